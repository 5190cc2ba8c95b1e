"""SVGD as an optax gradient transformation."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jsvgd import dispatch
from jsvgd.bandwidth import check_bandwidth_choice, resolve_bandwidth
from jsvgd.direction import svgd_direction
from jsvgd.kernels import get_kernel
from jsvgd.trees import check_particles, to_matrix

__all__ = ["ScaleBySVGDState", "scale_by_svgd"]


class ScaleBySVGDState(NamedTuple):
    """State of ``scale_by_svgd``.

    Attributes:
      count: updates made so far, int32.
      bandwidth: h of the last update, a scalar or (d,); NaN before the first one.
    """

    count: jax.Array
    bandwidth: jax.Array


def scale_by_svgd(
    *,
    kernel="rbf",
    bandwidth="median",
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
      kernel: "rbf", "imq" or a ``RadialKernel``.
      bandwidth: a rule by name ("median", "liu", ...), a ``BandwidthRule``, a number, or a callable;
        see ``jsvgd.bandwidth.resolve_bandwidth``.
      repulsion: factor of the repulsive term.
      precision, implementation: as in ``svgd_direction``.

    Returns:
      An ``optax.GradientTransformation`` whose ``update`` needs ``params``.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> optimizer = optax.chain(scale_by_svgd(), optax.sgd(0.1))
      >>> particles = jnp.linspace(-3.0, 3.0, 10)[:, None]
      >>> state = optimizer.init(particles)
      >>> updates, state = optimizer.update(particles, state, particles)  # -grad log N(0, 1) = x
      >>> optax.apply_updates(particles, updates).shape
      (10, 1)
    """
    kernel = get_kernel(kernel)
    check_bandwidth_choice(bandwidth)
    if precision not in dispatch.PRECISIONS:
        raise ValueError(f"precision must be one of {dispatch.PRECISIONS}, got {precision!r}")
    if implementation is not None and implementation not in dispatch.IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be None or one of {dispatch.IMPLEMENTATIONS}, "
            f"got {implementation!r}"
        )

    def init(params):
        check_particles("params", params)
        matrix = jax.eval_shape(lambda tree: to_matrix(jax.tree.map(jnp.asarray, tree))[0], params)
        h = jax.eval_shape(
            lambda x: resolve_bandwidth(bandwidth, x, jnp.zeros((), jnp.int32)), matrix
        )
        return ScaleBySVGDState(jnp.zeros((), jnp.int32), jnp.full(h.shape, jnp.nan, h.dtype))

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
        x, _ = to_matrix(params)
        gradients, from_matrix = to_matrix(updates)
        h = resolve_bandwidth(bandwidth, x, state.count)
        phi = svgd_direction(
            x,
            -gradients.astype(x.dtype),
            h,
            kernel=kernel,
            repulsion=repulsion,
            precision=precision,
            implementation=implementation,
        )
        state = ScaleBySVGDState(state.count + 1, h.astype(state.bandwidth.dtype))
        return from_matrix(-phi), state

    return optax.GradientTransformation(init, update)
