"""The compiled part of ``jsvgd.fit``: guarded blocks of whitened SVGD steps.

A block is ``refresh_every`` steps with one preconditioner and one bandwidth. After it the scores and the
residual of Stein's identity are looked at: a block that ends in numbers that are not finite, or that
raises the residual hugely or loses a tenth of the particles, is undone and made again with half the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jsvgd.bandwidth import resolve_bandwidth
from jsvgd.composite import LinearKernel
from jsvgd.direction import svgd_direction
from jsvgd.kernels import Kernel
from jsvgd.preconditioner import (
    Preconditioner,
    centre,
    diagonal_factor,
    from_whitened,
    to_whitened,
    whitened_scores,
)

__all__ = ["FitState", "Numbers", "Recipe", "Record", "advance", "scores_of", "start"]

ATTEMPTS_A_CALL = 20
# A residual may rise tenfold, or to this, before a block counts as blown up.
TOLERATED_GROWTH, TOLERATED_RESIDUAL = 10.0, 30.0
# Scores in units of one over the particles' spread: more than this says nothing but "far away".
LARGEST_SCORE = 1e12


class Recipe(NamedTuple):
    """What a compiled loop is compiled for; hashable."""

    logdensity: Callable
    kernel: Kernel
    bandwidth: Any  # None where a number or an array is among the numbers
    preconditioner: Preconditioner | None  # None, too, where a constant factor is in the state
    block_length: int
    step_size: Callable
    widening: Callable
    temperature: Callable
    precision: str
    implementation: str | None
    score_batch_size: int | None


class Numbers(NamedTuple):
    """What may change from call to call without compiling again.

    All are scalars, but for the bandwidth: () or (d,), or None where the recipe has a rule.
    """

    num_steps: jax.Array
    linear_weight: jax.Array
    step_size: jax.Array
    widening: jax.Array
    max_move: jax.Array
    bandwidth: jax.Array | None = None


class FitState(NamedTuple):
    """All that the loop needs to go on, and what it remembers for the diagnostics.

    Attributes:
      particles: unconstrained, (N, d).
      scores: raw scores there, (N, d), as they came: possibly not finite.
      step: steps made, int32.
      step_factor: <= 1, what the guard has made of the step size.
      retries: blocks undone so far, int32.
      sds_before: sds of the particles after half of the steps, (d,).
      factor: L of the preconditioner, (d,) or (d, d), as it last was; None without one.
      lost_at_start: particles without a finite score before the first step, int32.
    """

    particles: jax.Array
    scores: jax.Array
    step: jax.Array
    step_factor: jax.Array
    retries: jax.Array
    sds_before: jax.Array
    factor: jax.Array | None
    lost_at_start: jax.Array


class Record(NamedTuple):
    """One block of the history.

    Attributes:
      step: steps made by its end.
      direction: rms of the whitened direction at its last step.
      residual: rms of the residuals of Stein's identity at its end.
      bandwidth: h in whitened coordinates.
      turning: cosine between the last two directions; near -1 the steps overshoot.
      step_factor: what the guard left of the step size.
    """

    step: jax.Array
    direction: jax.Array
    residual: jax.Array
    bandwidth: jax.Array
    turning: jax.Array
    step_factor: jax.Array


def scores_of(logdensity: Callable, particles: jax.Array, batch_size: int | None) -> jax.Array:
    """grad log p, (N, d); NaN where log p itself is not finite."""

    def score(x):
        value, gradient = jax.value_and_grad(logdensity)(x)
        return jnp.where(jnp.isfinite(value), gradient, jnp.nan)

    if batch_size is None:
        return jax.vmap(score)(particles)
    return lax.map(score, particles, batch_size=batch_size)


@functools.partial(jax.jit, static_argnums=0)
def start(recipe: Recipe, particles: jax.Array, factor: jax.Array | None = None) -> FitState:
    """The state before the first step; with a constant factor of the preconditioner, if one is given."""
    dtype = particles.dtype
    if recipe.preconditioner is not None:
        factor = recipe.preconditioner.factor(particles).astype(dtype)
    scores = scores_of(recipe.logdensity, particles, recipe.score_batch_size).astype(dtype)
    return FitState(
        particles,
        scores,
        jnp.zeros((), jnp.int32),
        jnp.ones((), dtype),
        jnp.zeros((), jnp.int32),
        diagonal_factor(particles),
        factor,
        _count_lost(scores),
    )


@functools.partial(jax.jit, static_argnums=0)
def advance(recipe: Recipe, numbers: Numbers, state: FitState, stop: jax.Array):
    """Blocks until ``stop`` steps are made or ``ATTEMPTS_A_CALL`` were tried.

    Returns:
      The state, a ``Record`` with a leading axis of ATTEMPTS_A_CALL, and how many of them are filled.
    """

    def body(carry):
        attempt, state, records = carry
        state, record = _guarded_block(recipe, numbers, state, stop)
        return attempt + 1, state, jax.tree.map(lambda b, r: b.at[attempt].set(r), records, record)

    def going(carry):
        attempt, state, _ = carry
        return (attempt < ATTEMPTS_A_CALL) & (state.step < stop)

    record = jax.eval_shape(lambda: _guarded_block(recipe, numbers, state, stop)[1])
    records = jax.tree.map(lambda a: jnp.zeros((ATTEMPTS_A_CALL, *a.shape), a.dtype), record)
    filled, state, records = lax.while_loop(going, body, (jnp.int32(0), state, records))
    return state, records, filled


class _Coordinates(NamedTuple):
    """x = m + L z."""

    mean: jax.Array
    factor: jax.Array | None

    def whiten(self, particles):
        return to_whitened(self.factor, particles - self.mean)

    def whiten_scores(self, scores):
        s = whitened_scores(self.factor, jnp.where(jnp.isfinite(scores), scores, 0))
        return jnp.clip(s, -LARGEST_SCORE, LARGEST_SCORE)

    def residual(self, state):
        return stein_residual(self.whiten(state.particles), self.whiten_scores(state.scores))


def _guarded_block(recipe, numbers, state, stop):
    mean = centre(state.particles)
    factor = state.factor
    if recipe.preconditioner is not None:
        factor = recipe.preconditioner.refreshed(state.particles, state.step, factor)
    coordinates = _Coordinates(mean, factor)
    z = coordinates.whiten(state.particles)
    before = stein_residual(z, coordinates.whiten_scores(state.scores))
    bandwidth = recipe.bandwidth if numbers.bandwidth is None else numbers.bandwidth
    h = resolve_bandwidth(bandwidth, z, state.step)
    h = h * recipe.widening(state.step / numbers.num_steps, numbers.widening)
    tried, record = _block(recipe, numbers, state, stop, coordinates, h)
    after = coordinates.residual(tried)

    lost = _count_lost(tried.scores) - state.lost_at_start
    limit = jnp.maximum(TOLERATED_GROWTH * before, TOLERATED_RESIDUAL)
    accepted = jnp.all(jnp.isfinite(tried.particles)) & (after <= limit)
    # A few particles may stray out of the domain for a while: the others pull them back. They are counted
    # since the start of the run, or all would leave in turn.
    accepted &= lost <= tried.particles.shape[0] // 10
    undone = state._replace(step_factor=state.step_factor / 2, retries=state.retries + 1)
    tried = tried._replace(step_factor=jnp.minimum(1.25 * tried.step_factor, 1.0), factor=factor)
    state = jax.tree.map(lambda a, b: jnp.where(accepted, a, b), tried, undone)
    record = Record(
        state.step,
        record.direction,
        jnp.where(accepted, after, before),
        h,
        record.turning,
        state.step_factor,
    )
    return state, record


class _Moves(NamedTuple):
    direction: jax.Array
    turning: jax.Array


def _block(recipe, numbers, state, stop, coordinates, h):
    """``block_length`` steps, fewer at the end, in fixed coordinates."""
    kernel = recipe.kernel + numbers.linear_weight * LinearKernel()
    half = numbers.num_steps // 2

    def one_step(_, carry):
        state, z, previous, _ = carry
        s = coordinates.whiten_scores(state.scores)
        phi = svgd_direction(
            z,
            s / recipe.temperature(state.step),
            h,
            kernel=kernel,
            precision=recipe.precision,
            implementation=recipe.implementation,
        )
        rms = jnp.sqrt(jnp.mean(phi**2))
        turning = jnp.mean(phi * previous) / (rms * jnp.sqrt(jnp.mean(previous**2)) + 1e-30)
        schedule = recipe.step_size(state.step / numbers.num_steps, state.step, numbers.step_size)
        step_size = state.step_factor * schedule
        # One clip for all particles: clipping them one by one bends the field.
        length = step_size * jnp.minimum(1.0, numbers.max_move / (step_size * rms + 1e-30))
        z += length * phi
        x = coordinates.mean + from_whitened(coordinates.factor, z)
        sds = jnp.where(state.step < half, diagonal_factor(x), state.sds_before)
        moved = FitState(
            x,
            scores_of(recipe.logdensity, x, recipe.score_batch_size).astype(x.dtype),
            state.step + 1,
            state.step_factor,
            state.retries,
            sds,
            state.factor,
            state.lost_at_start,
        )
        return moved, z, phi, _Moves(rms, turning)

    count = jnp.minimum(recipe.block_length, stop - state.step)
    zero = jnp.zeros((), state.particles.dtype)
    z = coordinates.whiten(state.particles)
    carry = (state, z, jnp.zeros_like(z), _Moves(zero, zero))
    state, _, _, moves = lax.fori_loop(0, count, one_step, carry)
    return state, moves


def stein_residual(z: jax.Array, s: jax.Array) -> jax.Array:
    """rms over the dimensions of E[s] and 1 + E[z s], both zero at the target; for whitened (N, d)."""
    z = z - jnp.mean(z, axis=0)
    first, second = jnp.mean(s, axis=0), 1 + jnp.mean(z * s, axis=0)
    return jnp.sqrt(jnp.mean(first**2 + second**2))


def _count_lost(scores) -> jax.Array:
    return jnp.sum(~jnp.all(jnp.isfinite(scores), axis=1), dtype=jnp.int32)
