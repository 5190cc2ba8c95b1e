"""The Langevin Stein kernel of particles with a radial kernel, and pair quantities that keep their digits.

With k = f(u), u = sum_c r_c^2 / (2 h_c), r = x - y, w = -f':

    k_p(x, y) = s_x.s_y f + w sum_c (s_x - s_y)_c r_c / h_c + w sum_c 1 / h_c - f'' sum_c r_c^2 / h_c^2

Near particles meet by products, particles far apart by differences of raw coordinates
(``pair_arithmetic``): products have lost too many digits there.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jsvgd import coordinates, pair_arithmetic
from jsvgd.coordinates import FAR_BACKWARD, any_beyond, half_reach, standardise
from jsvgd.kernels import RadialKernel
from jsvgd.streamed import map_row_blocks

__all__ = ["by_digits", "product", "row_sums", "squared_distances", "stein_kernel"]

DIRECT_DIMENSIONS = (
    8  # up to here squared distances of near particles are sums of squared differences
)


def by_digits(particles, bandwidth, function: Callable) -> jax.Array:
    """function(far), with a static far: whether particles lie so far apart that differences are needed.

    Under vmap one far problem sends all of them to differences.

    Args:
      particles: (N, d). bandwidth: h, a scalar or (d,).
      function: for far = True and False it returns equal shapes.
    """
    raw = coordinates.raw(particles, particles, bandwidth, None, 1.0)
    far = any_beyond(FAR_BACKWARD, half_reach(standardise(raw)))
    return lax.cond(far, lambda: function(True), lambda: function(False))


def stein_kernel(particles, scores, bandwidth, kernel: RadialKernel, *, far: bool) -> Callable:
    """k_p between rows and all particles.

    Args:
      particles, scores: (N, d).
      bandwidth: h, a scalar or (d,).
      kernel: a ``RadialKernel``.
      far: as `by_digits` tells.

    Returns:
      ``block(x (B, d), s (B, d)) -> (B, N)``, for rows of these particles.
    """
    inverse = jnp.broadcast_to(1 / bandwidth, particles.shape[1:])
    make = _by_differences if far else _by_products
    pairs = make(particles, scores, inverse, jnp.ndim(bandwidth) == 0)

    def block(x, s):
        u, moment, pull = pairs(x, s)
        repulsion = kernel.slope(u) * (pull + jnp.sum(inverse)) - kernel.curvature(u) * moment
        return product(s, scores) * kernel.profile(u) + repulsion

    return block


def _by_products(particles, t, inverse, isotropic):
    """(x, s) -> u, sum_c r_c^2 / h_c^2 and sum_c (s - t)_c r_c / h_c, each (B, N)."""
    centre = lax.stop_gradient(jnp.mean(particles, axis=0))
    y, root = particles - centre, jnp.sqrt(inverse)

    def pairs(x, s):
        x = x - centre
        u = squared_distances(x * root, y * root) / 2
        moment = 2 * u * inverse[0] if isotropic else squared_distances(x * inverse, y * inverse)
        pull = (
            jnp.sum(s * x * inverse, axis=1)[:, None]
            + jnp.sum(t * y * inverse, axis=1)[None, :]
            - product(s * inverse, y)
            - product(x * inverse, t)
        )
        return u, moment, pull

    return pairs


def _by_differences(particles, t, inverse, isotropic):
    """As `_by_products`."""
    root = jnp.sqrt(inverse)
    scaled = pair_arithmetic.direct(root)
    twice = pair_arithmetic.direct(inverse)

    def pairs(x, s):
        u = scaled.half_squared_distances(x, particles, None)
        half = u * inverse[0] if isotropic else twice.half_squared_distances(x, particles, None)
        pull = scaled.project(s * root, x, particles, None)
        return u, 2 * half, pull + scaled.project_back(t * root, x, particles, None)

    return pairs


def row_sums(block: Callable, n: int, m: int, d: int, *, far: bool, without_diagonal: bool):
    """Sums of the rows of an (n, m) matrix that ``block(rows)`` gives some rows of, (n,)."""

    def sums(rows):
        values = block(rows)
        if without_diagonal:
            values = jnp.where(rows[:, None] == jnp.arange(m), 0, values)
        return jnp.sum(values, axis=1)

    elements = pair_arithmetic.direct().elements_a_pair(d) if far else 1
    return map_row_blocks(sums, (jnp.arange(n),), m * elements)


def squared_distances(x, y) -> jax.Array:
    """(B, N) squared distances of near, centred points; by differences where that is cheap."""
    if x.shape[1] <= DIRECT_DIMENSIONS:
        total = 0.0
        for c in range(x.shape[1]):
            total = total + (x[:, c, None] - y[None, :, c]) ** 2
        return total
    norms = jnp.sum(x * x, axis=1)[:, None] + jnp.sum(y * y, axis=1)[None, :]
    return jnp.maximum(norms - 2 * product(x, y), 0)


def product(x, y) -> jax.Array:
    """x y^T in full precision: a matrix unit would round float32 to fewer digits."""
    return jnp.matmul(x, y.T, precision=lax.Precision.HIGHEST)
