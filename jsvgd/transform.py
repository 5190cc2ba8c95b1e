"""SVGD as an optax gradient transformation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jsvgd import dispatch
from jsvgd.arguments import check_real
from jsvgd.bandwidth import check_bandwidth_choice, resolve_bandwidth
from jsvgd.composite import as_kernel
from jsvgd.direction import svgd_direction
from jsvgd.preconditioner import (
    as_preconditioner,
    centre,
    from_whitened,
    to_whitened,
    whitened_scores,
)
from jsvgd.trees import check_particles, to_matrix

__all__ = ["ScaleBySVGDState", "as_temperature", "scale_by_svgd"]


class ScaleBySVGDState(NamedTuple):
    """State of ``scale_by_svgd``.

    Attributes:
      count: updates made so far, int32.
      bandwidth: h of the last update, a scalar or (d,), in preconditioned coordinates; 0 before the
        first one.
      factor: L of the preconditioner, (d,) or (d, d); None without one.
    """

    count: jax.Array
    bandwidth: jax.Array
    factor: Any = None


def scale_by_svgd(
    *,
    kernel="rbf",
    bandwidth="median",
    preconditioner=None,
    refresh_every: int | None = 5,
    temperature=1.0,
    repulsion=1.0,
    precision: str = "high",
    implementation: str | None = None,
) -> optax.GradientTransformation:
    """Replaces the gradients of particles by minus their SVGD direction (Liu and Wang, 2016).

    Parameters are a pytree with a leading particle axis on every leaf, updates the gradients of the
    NEGATIVE log density at each particle, as a training loop has them. What comes out is -phi, so that
    ``optax.chain(scale_by_svgd(), optax.adam(1e-2))`` turns a loop that trains one model into one that
    samples N of them.

    Args:
      kernel: any kernel of ``svgd_direction``: "rbf", "imq", "linear", a sum, a function.
      bandwidth: a rule by name ("median", "liu", ...), a ``BandwidthRule``, a number, a
        ``BandwidthSchedule`` or a function of the particles; see ``jsvgd.bandwidth.resolve_bandwidth``.
      preconditioner: None, "diagonal", "covariance" (of the particles: affine invariant), a matrix, or a
        function of the particles; see ``jsvgd.preconditioner.as_preconditioner``. Kernel and bandwidth
        act in preconditioned coordinates, the optimiser on the move in those of the parameters: of
        optax's optimisers ``sgd`` keeps the affine invariance, ``adam`` undoes it.
      refresh_every: updates between two computations of the preconditioner.
      temperature: T > 0, a number or an optax schedule: scores are divided by it, so the target is
        p^(1/T). A schedule from large to 1 is annealing (D'Angelo and Fortuin, 2021).
      repulsion: factor of the repulsive term.
      precision, implementation: as in ``svgd_direction``.

    Returns:
      An ``optax.GradientTransformation`` whose ``update`` needs ``params``. Numbers and schedules may
      be injected, ``optax.inject_hyperparams(scale_by_svgd)(temperature=2.0)``. optax takes every
      function for a schedule of the step: a function of the particles (``kernel``, ``bandwidth``,
      ``preconditioner``) is named in its ``static_args``.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> optimizer = optax.chain(scale_by_svgd(), optax.sgd(0.1))
      >>> particles = jnp.linspace(-3.0, 3.0, 10)[:, None]
      >>> state = optimizer.init(particles)
      >>> updates, state = optimizer.update(particles, state, particles)  # -grad log N(0, 1) = x
      >>> optax.apply_updates(particles, updates).shape
      (10, 1)
    """
    kernel = as_kernel(kernel)
    check_bandwidth_choice(bandwidth)
    preconditioner = as_preconditioner(preconditioner, refresh_every)
    temperature_at = as_temperature(temperature)
    check_real("repulsion", repulsion, jnp.result_type(float))
    dispatch.check_names(precision, implementation)

    def init(params):
        check_particles("params", params)
        matrix = jax.eval_shape(lambda tree: to_matrix(jax.tree.map(jnp.asarray, tree))[0], params)
        h = jax.eval_shape(
            lambda x: resolve_bandwidth(bandwidth, x, jnp.zeros((), jnp.int32)), matrix
        )
        factor = None
        if preconditioner is not None:
            shape = preconditioner.check(matrix)
            factor = jnp.ones(shape.shape, matrix.dtype)
        return ScaleBySVGDState(jnp.zeros((), jnp.int32), jnp.zeros(h.shape, h.dtype), factor)

    def update(updates, state, params=None):
        if params is None:
            raise ValueError(
                "scale_by_svgd needs the particles: call update(updates, state, params)"
            )
        if jax.tree.structure(updates) != jax.tree.structure(params):
            raise ValueError(
                "updates must have the structure of params, "
                f"{jax.tree.structure(params)}, got {jax.tree.structure(updates)}"
            )
        check_particles("params", params)
        shapes, update_shapes = jax.tree.map(jnp.shape, params), jax.tree.map(jnp.shape, updates)
        if shapes != update_shapes:
            raise ValueError(
                f"updates must have the shapes of params, {shapes}, got {update_shapes}"
            )
        x, _ = to_matrix(params)
        gradients, from_matrix = to_matrix(updates)
        scores = -gradients.astype(x.dtype) / temperature_at(state.count).astype(x.dtype)
        factor = state.factor
        if preconditioner is not None:
            factor = preconditioner.refreshed(x, state.count, factor)
            x, scores = to_whitened(factor, x - centre(x)), whitened_scores(factor, scores)
        h = resolve_bandwidth(bandwidth, x, state.count)
        # Rules without a floor give 0 where most particles coincide. They neither attract nor repel
        # each other by any h, and must not become NaN by this one: the floor of the default rule.
        h = jnp.where(h == 0, 1e-5, h)
        phi = svgd_direction(
            x,
            scores,
            h,
            kernel=kernel,
            repulsion=repulsion,
            precision=precision,
            implementation=implementation,
        )
        state = ScaleBySVGDState(state.count + 1, h.astype(state.bandwidth.dtype), factor)
        return from_matrix(-from_whitened(factor, phi)), state

    return optax.GradientTransformation(init, update)


def as_temperature(temperature):
    """A function from the step to T, of a number > 0 or an optax schedule."""
    if callable(temperature):
        return lambda step: jnp.asarray(temperature(step))
    constant = check_real("temperature", temperature, jnp.result_type(float))
    if constant.ndim:
        raise ValueError(f"temperature must be a scalar or a schedule, got shape {constant.shape}")
    if not isinstance(constant, jax.core.Tracer) and not constant > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return lambda step: constant
