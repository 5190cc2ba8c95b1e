"""``fit``: from a log density to particles whose means and standard deviations can be believed."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jsvgd import dispatch, fit_checks, fit_loop
from jsvgd import fit_schedules as schedules
from jsvgd.bandwidth import BandwidthRule, BandwidthSchedule, check_bandwidth_choice
from jsvgd.composite import as_kernel
from jsvgd.fit_arguments import check_numbers, check_resume, resolve_preconditioner
from jsvgd.fit_loop import FitState, Numbers, Recipe, Record
from jsvgd.fit_result import FitResult, judge, summarise
from jsvgd.preconditioner import diagonal_factor
from jsvgd.run_checks import check_key
from jsvgd.supports import VectorDensity, resolve_supports, unconstrain
from jsvgd.trees import check_particles, to_matrix

__all__ = ["fit"]

BANDWIDTH = BandwidthRule(multiplier=2.0, interpolation="linear", log=None, floor=1e-6)
# Halvings of the step size in a row after which it is no use going on.
SMALLEST_STEP_FACTOR = 2.0**-20


def fit(
    rng_key: jax.Array,
    logdensity_fn: Callable,
    particles: Any,
    *,
    num_steps: int = 1000,
    linear_weight: float = 0.1,
    preconditioner="covariance",
    refresh_every: int = 5,
    kernel="rbf",
    bandwidth=BANDWIDTH,
    widening: float | Callable = 10.0,
    step_size: float | Callable = 0.5,
    max_move: float = 0.5,
    temperature: float | Callable = 1.0,
    supports: Any = None,
    score_batch_size: int | None = None,
    precision: str = "high",
    implementation: str | None = None,
    progress: bool = False,
    stop_after: int | None = None,
    resume: FitResult | None = None,
) -> FitResult:
    r"""Posterior particles with the right means and standard deviations, and what to think of them.

    SVGD in the coordinates z in which the particles have covariance I (matrix SVGD with a constant
    preconditioner: Wang et al., 2019), with the kernel

    .. math:: \exp(-|z - z'|^2 / b) + 0.1 (1 + z \cdot z'), \qquad b = 2 \operatorname{median}|z_i - z_j|^2

    The linear part fixes the first two moments (Liu and Wang, 2018), the other one the shape. b starts
    ten times as large and falls geometrically over the first quarter of the steps, so that far
    particles feel each other. The step is 0.5 for the first half and falls linearly to 0.005; no step moves
    the particles by more than ``max_move`` of their spread. Every few steps the scores and the
    residuals of Stein's identity are looked at: steps that blow up are undone and made smaller.

    Limits, and what to do:

    * N <= d + 1 particles cannot be whitened. The standard deviations alone are used, and cannot be
      relied on: take more particles, or use ``svgd`` for networks and read predictions only.
    * Modes far apart keep the shares of particles that the start gave them, and modes without particles
      are never found: use tempering or MCMC where weights matter.
    * Funnels and heavy tails converge slowly and can end biased: a hierarchical scale at N = 100 may keep
      drifting outwards. Take N >= 500 with 4000 steps, reparametrise, or check with NUTS.
    * Strongly curved posteriors need steps: 2000 to 4000.
    * At N = 100 the sd of a skewed parameter rests on a few outermost particles, as with 100 independent
      draws. Prefer quantiles, or more particles.
    * A log density that loses digits in float32 shows in residuals that stop falling: enable float64 and
      pass float64 particles.

    Args:
      rng_key: of ``jax.random.key``; used only to part particles that coincide in a dimension.
      logdensity_fn: log density, up to a constant, of ONE particle (a pytree without the particle axis).
      particles: where to start, a pytree with a leading particle axis N on every leaf, float32 or wider,
        inside the supports. N(0, 1) draws on standardised data are a good start.
      num_steps: in all, of which the schedules take their fractions.
      linear_weight: weight of the linear kernel.
      preconditioner: "covariance", "diagonal", None, a matrix or a function of the unconstrained particles
        (N, d); see ``as_preconditioner``.
      refresh_every: steps between two computations of the preconditioner and the bandwidth. That of a
        ``Preconditioner`` may be a multiple of it, or None: once, from the particles at the start.
      kernel: "rbf", "imq", or another kernel of ``svgd_direction``.
      bandwidth: in whitened coordinates, in any form of ``resolve_bandwidth``.
      widening: factor of the bandwidth at the start; or a function of the fraction of the steps made.
      step_size: the first one; or an optax schedule of the step, which then is all there is.
      max_move: largest rms move of a step, in standard deviations.
      temperature: a number, or an optax schedule of the step: the target is p^(1/T).
      supports: of positive, bounded and simplex parameters; see ``jsvgd.supports.resolve_supports``.
        log-Jacobians are added to the log density. Needs NumPyro.
      score_batch_size: scores are computed for so many particles at a time; None for all together.
      precision, implementation: as in ``svgd_direction``.
      progress: shows a bar.
      stop_after: makes no more than so many of the ``num_steps`` (rounded up to whole blocks of
        ``refresh_every``), to go on later.
      resume: the result of a call with ``stop_after`` and otherwise the same arguments: the two end
        bitwise where one call does.

    Returns:
      ``FitResult``: particles, summary, diagnostics, verdict and warnings.

    Raises:
      ValueError: for numbers out of range, a ``resume`` of another run, particles outside their supports, a
        log density that has no finite gradient at any particle.
      TypeError: where ``logdensity_fn`` is not callable, and for arguments of another type.

    Example:
      >>> import jax, jax.numpy as jnp, jsvgd
      >>> def logdensity(p):  # mean 3, sd 0.1
      ...     return -0.5 * jnp.sum((p["x"] - 3.0) ** 2) / 0.01
      >>> start = {"x": jax.random.normal(jax.random.key(0), (100, 2))}
      >>> result = fit(jax.random.key(1), logdensity, start)
      >>> result.good, bool(abs(result.summary.sd[0] - 0.1) < 0.002)
      (True, True)
    """
    if not callable(logdensity_fn):
        raise TypeError(
            f"logdensity_fn must be a function of one particle, got {type(logdensity_fn).__name__}"
        )
    check_key("rng_key", rng_key)
    check_numbers(num_steps, linear_weight, max_move, refresh_every, score_batch_size, stop_after)
    check_bandwidth_choice(bandwidth)
    dispatch.check_names(precision, implementation)
    n = check_particles("particles", particles)
    density, x = _unconstrained(logdensity_fn, particles, supports)
    notes = []
    x = _part_coincident(rng_key, x, notes)
    step_size, step_schedule = schedules.step_schedule(step_size)
    widening, widening_schedule = schedules.widening_schedule(widening)
    with warnings.catch_warnings(record=True):  # the verdict says it
        warnings.simplefilter("always")
        preconditioner, factor = resolve_preconditioner(preconditioner, refresh_every, x)
    constant_bandwidth = not (
        isinstance(bandwidth, (str, BandwidthRule, BandwidthSchedule)) or callable(bandwidth)
    )
    recipe = Recipe(
        logdensity=density,
        kernel=as_kernel(kernel),
        bandwidth=None if constant_bandwidth else bandwidth,
        preconditioner=preconditioner,
        block_length=refresh_every,
        step_size=step_schedule,
        widening=widening_schedule,
        temperature=schedules.temperature_schedule(temperature),
        precision=precision,
        implementation=implementation,
        score_batch_size=score_batch_size,
    )
    numbers = Numbers(
        jnp.int32(num_steps),
        *(jnp.asarray(a, x.dtype) for a in (linear_weight, step_size, widening, max_move)),
        bandwidth=jnp.asarray(bandwidth, x.dtype) if constant_bandwidth else None,
    )
    state = fit_loop.start(recipe, x, factor)
    if resume is not None:
        check_resume(resume, state, num_steps, refresh_every)
        state = resume.state
    if state.factor is not None and not np.all(np.isfinite(state.factor)):
        raise ValueError(
            "preconditioner gives a factor that is not finite for the particles at the start"
        )
    if not np.any(np.all(np.isfinite(state.scores), axis=1)):
        raise ValueError(
            f"logdensity_fn has no finite gradient at any of the {n} particles: start inside its "
            "domain, or state the supports of its parameters"
        )
    stop = num_steps
    if stop_after is not None:
        stop = min(num_steps, -(-(int(state.step) + stop_after) // refresh_every) * refresh_every)
    state, history = _run(recipe, numbers, state, stop, progress)
    if resume is not None:
        history = jax.tree.map(lambda *a: np.concatenate(a), resume.history, history)
    return _result(density, x, state, history, stop, num_steps, notes)


def _run(recipe, numbers, state: FitState, stop: int, progress: bool) -> tuple[FitState, Record]:
    parts = []
    with _bar(progress, int(state.step), stop) as bar:
        while int(state.step) < stop and float(state.step_factor) > SMALLEST_STEP_FACTOR:
            before = int(state.step)
            state, records, filled = fit_loop.advance(recipe, numbers, state, jnp.int32(stop))
            filled = int(filled)
            parts.append(jax.tree.map(lambda a, filled=filled: np.asarray(a[:filled]), records))
            if bar is not None:
                bar.update(int(state.step) - before)
                bar.set_postfix(residual=f"{float(parts[-1].residual[-1]):.3g}", refresh=False)
    if not parts:
        return state, Record(*(np.zeros(0) for _ in Record._fields))
    return state, jax.tree.map(lambda *a: np.concatenate(a), *parts)


def _bar(progress: bool, step: int, stop: int):
    """A context with the bar, closed even where a step raises, or with None."""
    if not progress:
        return contextlib.nullcontext()
    from tqdm.auto import tqdm  # importing it takes time

    return contextlib.closing(tqdm(total=stop, initial=step, unit="step"))


def _result(
    density, start, state: FitState, history: Record, stop: int, num_steps: int, notes
) -> FitResult:
    x = state.particles
    past_half = int(state.step) > num_steps // 2  # before, sds_before are those of the moment
    n, d = x.shape
    finite = jnp.all(jnp.isfinite(state.scores), axis=1)
    scores = jnp.where(finite[:, None], state.scores, 0)
    check = fit_checks.target_check(x, scores)
    sds = diagonal_factor(x)
    half = history.turning[len(history.turning) // 2 :]
    split = fit_checks.split_check(np.asarray(x))
    particles = jax.jit(jax.vmap(lambda vector: density.position(vector)[0]))(x)
    diagnostics = fit_checks.Diagnostics(
        num_particles=n,
        dimension=d,
        num_steps=int(state.step),
        mean_residual=float(jnp.max(jnp.abs(check.mean_residuals))),
        spread_residual=float(jnp.max(jnp.abs(check.spread_residuals))),
        sd_drift=float(jnp.max(jnp.abs(jnp.log(sds / state.sds_before))))
        if past_half
        else math.nan,
        ksd=float(check.ksd),
        ksd_ratio=float(check.ksd_ratio),
        movement=float(jnp.sqrt(jnp.mean(((x - start) / sds) ** 2))),
        last_direction=float(history.direction[-1]) if len(history.direction) else math.nan,
        turning=float(np.nanmedian(half)) if np.isfinite(half).any() else math.nan,
        retries=int(state.retries),
        step_factor=float(state.step_factor),
        lost=n - int(jnp.sum(finite)),
        overflowed=n - int(np.sum(np.all(np.isfinite(to_matrix(particles)[0]), axis=1))),
        split=split.explained,
        split_share=split.smaller_share,
        other_basin=fit_checks.basin_check(density, start, x),
    )
    verdict, found = judge(diagnostics, complete=int(state.step) >= stop)
    found = tuple(notes) + found
    for warning in found:
        warnings.warn(f"jsvgd.fit: {warning}", stacklevel=3)
    return FitResult(
        particles, summarise(particles), diagnostics, verdict, found, history, x, state, num_steps
    )


def _unconstrained(logdensity_fn, particles, supports) -> tuple[VectorDensity, jax.Array]:
    particles = jax.tree.map(jnp.asarray, particles)
    supports = resolve_supports(supports, particles)
    unconstrained = unconstrain(supports, particles)
    x, _ = to_matrix(unconstrained)
    lost = int(jnp.sum(~jnp.all(jnp.isfinite(x), axis=1)))
    if lost:
        raise ValueError(
            f"{lost} of {x.shape[0]} particles are not finite or lie outside their supports, supports="
        )
    return VectorDensity.of(logdensity_fn, unconstrained, supports), x


def _part_coincident(rng_key, x, notes) -> jax.Array:
    """Particles that agree in a dimension never part there by themselves: a little noise does it."""
    n = x.shape[0]
    largest = np.max(np.abs(np.asarray(x)), axis=0)
    spread = np.ptp(np.asarray(x), axis=0)
    same = spread <= 4 * np.finfo(x.dtype).eps * largest
    if n == 1 or not same.any():
        return x
    notes.append(
        f"all particles start at one value in {int(same.sum())} of {len(same)} dimensions: they were "
        "parted there by noise of 1e-2 of that value (or of 1). Start with some spread."
    )
    noise = jax.random.normal(rng_key, x.shape, x.dtype) * np.where(largest > 0, largest, 1) * 1e-2
    return jnp.where(same, x + noise, x)
