"""The sampler: SVGD from a log density and an optax optimiser, in BlackJAX's init/step shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jsvgd.arguments import at_least
from jsvgd.groups import scale_by_svgd_per_group
from jsvgd.transform import ScaleBySVGDState, scale_by_svgd
from jsvgd.trees import check_particles, settled

__all__ = ["SVGDInfo", "SVGDState", "SamplingAlgorithm", "svgd"]


class SamplingAlgorithm(NamedTuple):
    """``init(particles, rng_key=None) -> state`` and ``step(rng_key, state, *args) -> (state, info)``."""

    init: Callable
    step: Callable


class SVGDState(NamedTuple):
    """All that a step needs.

    Attributes:
      particles: pytree, a leading particle axis on every leaf.
      optimizer_state: of the optax optimiser.
      transform_state: of ``scale_by_svgd``; its ``count`` is the number of steps made.
    """

    particles: Any
    optimizer_state: Any
    transform_state: ScaleBySVGDState

    @property
    def step(self) -> jax.Array:
        """Steps made so far."""
        return self.transform_state.count


class SVGDInfo(NamedTuple):
    """What happened in a step.

    Attributes:
      bandwidth: h, a squared length; scalar or (d,); with ``groups`` one a group, by its label.
      direction_norm: root mean square over the particles of |phi_i|.
      score_norm: root mean square over the particles of |s_i|.
      num_nonfinite: particles with a NaN or an infinity after the step, int32.
      log_density: mean over the particles of log p(x_i) before the step.
    """

    bandwidth: Any
    direction_norm: jax.Array
    score_norm: jax.Array
    num_nonfinite: jax.Array
    log_density: jax.Array


def svgd(
    logdensity_fn: Callable,
    optimizer: optax.GradientTransformation,
    *,
    kernel="rbf",
    bandwidth="median",
    preconditioner=None,
    refresh_every: int | None = 5,
    temperature=1.0,
    repulsion=1.0,
    precision: str = "high",
    implementation: str | None = None,
    score_batch_size: int | None = None,
    groups=None,
    per_particle_keys: bool = False,
) -> SamplingAlgorithm:
    """Stein variational gradient descent (Liu and Wang, 2016, algorithm 1).

    Args:
      logdensity_fn: ``logdensity_fn(position, *args)``, the log density of ONE particle up to a
        constant; ``args`` are those of ``step`` (a minibatch, say).
      optimizer: an optax optimiser; it receives -phi as the gradient.
      kernel, bandwidth, preconditioner, refresh_every, temperature, repulsion, precision,
        implementation: as in ``scale_by_svgd``.
      score_batch_size: scores are computed for so many particles at a time, where all N models do
        not fit in memory at once; None for all together.
      groups: one kernel a group of leaves instead of one over all of them: "layer", "leaf" or a
        function; see ``scale_by_svgd_per_group``.
      per_particle_keys: True for a log density that draws random numbers: it is called as
        ``logdensity_fn(position, *args, rng_key=key)``, with a key of its own for every particle and
        step.

    Returns:
      ``SamplingAlgorithm(init, step)``. It runs in a ``jax.lax.scan``, under ``jax.vmap`` over chains,
      in ``jsvgd.run`` and in ``blackjax.util.run_inference_algorithm``.

    Raises:
      TypeError: where ``logdensity_fn`` is not callable, ``optimizer`` no optax optimiser, or a number
        none.
      ValueError: for unknown names and sizes below one.

    Example:
      >>> import jax, optax, jsvgd
      >>> sampler = jsvgd.svgd(lambda x: -0.5 * (x @ x), optax.adam(0.1))
      >>> state = sampler.init(jax.random.normal(jax.random.key(0), (50, 2)))
      >>> state, info = jax.jit(sampler.step)(jax.random.key(1), state)
      >>> int(info.num_nonfinite)
      0
    """
    if not callable(logdensity_fn):
        raise TypeError(
            f"logdensity_fn must be a function of one particle, got {type(logdensity_fn).__name__}"
        )
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            f"optimizer must be an optax optimiser (init and update), got {type(optimizer).__name__}"
        )
    if score_batch_size is not None:
        score_batch_size = at_least("score_batch_size", score_batch_size, 1)
    per_group = {} if groups is None else {"groups": groups}
    transform = (scale_by_svgd if groups is None else scale_by_svgd_per_group)(
        kernel=kernel,
        bandwidth=bandwidth,
        preconditioner=preconditioner,
        refresh_every=refresh_every,
        temperature=temperature,
        repulsion=repulsion,
        precision=precision,
        implementation=implementation,
        **per_group,
    )

    def log_densities_and_scores(rng_key, particles, args):
        def one(position, **rng):
            return jax.value_and_grad(lambda x: logdensity_fn(x, *args, **rng))(position)

        if not per_particle_keys:
            function, arguments = one, particles
        else:
            count = jax.tree.leaves(particles)[0].shape[0]
            function = lambda pair: one(pair[0], rng_key=pair[1])
            arguments = (particles, jax.random.split(rng_key, count))
        if score_batch_size is None:
            return jax.vmap(function)(arguments)
        return jax.lax.map(function, arguments, batch_size=score_batch_size)

    def init(particles, rng_key=None):
        del rng_key
        check_particles("particles", particles)
        particles = settled(jax.tree.map(jnp.asarray, particles))
        return settled(SVGDState(particles, optimizer.init(particles), transform.init(particles)))

    def step(rng_key, state, *args):
        log_densities, scores = log_densities_and_scores(rng_key, state.particles, args)
        descent = jax.tree.map(jnp.negative, scores)
        minus_phi, transform_state = transform.update(
            descent, state.transform_state, state.particles
        )
        updates, optimizer_state = optimizer.update(
            minus_phi, state.optimizer_state, state.particles
        )
        particles = optax.apply_updates(state.particles, updates)
        info = SVGDInfo(
            bandwidth=transform_state.bandwidth,
            direction_norm=_root_mean_square_norm(minus_phi),
            score_norm=_root_mean_square_norm(scores),
            num_nonfinite=_count_nonfinite(particles),
            log_density=jnp.mean(log_densities),
        )
        return SVGDState(particles, optimizer_state, transform_state), info

    return SamplingAlgorithm(init, step)


def _root_mean_square_norm(tree) -> jax.Array:
    squares = [
        jnp.sum(jnp.square(leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))))
        for leaf in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares) / jax.tree.leaves(tree)[0].shape[0])


def _count_nonfinite(tree) -> jax.Array:
    finite = [
        jnp.all(jnp.isfinite(leaf.reshape(leaf.shape[0], -1)), axis=1)
        for leaf in jax.tree.leaves(tree)
    ]
    return jnp.sum(~jnp.all(jnp.stack(finite), axis=0)).astype(jnp.int32)
