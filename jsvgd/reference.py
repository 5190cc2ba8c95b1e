"""The oracle: SVGD written out densely, N x N x d, by direct differences.

Every other implementation is tested against this file in float64. It also keeps the PyTorch program
that the library grew out of, with the sign of its repulsion as it was written, as a lesson: see
``pytorch_direction``. Nothing here is meant for more than a few thousand particles.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jsvgd.kernels import RadialKernel, get_kernel

__all__ = ["direction", "median_bandwidth", "pytorch_direction", "update"]


def direction(
    particles: jax.Array,
    scores: jax.Array,
    bandwidth: jax.Array | float,
    *,
    queries: jax.Array | None = None,
    kernel: str | RadialKernel = "rbf",
    repulsion: jax.Array | float = 1.0,
) -> jax.Array:
    """The SVGD direction of Liu and Wang (2016, equation 8), written out.

    phi(y_i) = 1/N sum_j [ k(x_j, y_i) s_j + repulsion * grad_{x_j} k(x_j, y_i) ]

    Args:
      particles: (N, d).
      scores: (N, d), grad log p at the particles.
      bandwidth: h > 0, a squared length; scalar or (d,).
      queries: (M, d); the particles where absent.
      kernel: "rbf", "imq" or a ``RadialKernel``.
      repulsion: factor of the second term.

    Returns:
      (M, d), in the dtype of the inputs (float64 where they are).
    """
    kernel = get_kernel(kernel)
    queries = particles if queries is None else queries
    difference = queries[:, None, :] - particles[None, :, :]  # y_i - x_j
    u = jnp.sum(difference**2 / (2 * bandwidth), axis=-1)
    attraction = jnp.sum(kernel.profile(u)[..., None] * scores[None], axis=1)
    push = jnp.sum(kernel.slope(u)[..., None] * difference, axis=1) / bandwidth
    return (attraction + repulsion * push) / particles.shape[0]


def update(particles, scores, bandwidth, step_size, **options) -> jax.Array:
    """particles + step_size * direction(particles, scores, bandwidth, **options)."""
    return particles + step_size * direction(particles, scores, bandwidth, **options)


def pytorch_direction(
    particles: jax.Array, scores: jax.Array, bandwidth: jax.Array | float, *, mended: bool = False
) -> jax.Array:
    """The PyTorch program's direction, line by line.

    Its ``diff[a, b]`` is ``x[b] - x[a]``, so summing ``-diff / h * K`` over axis 0 gives particle i
    the term sum_j (x_j - x_i) K_ij / h: it attracts. The gradient of k(x_j, x_i) in x_j has the other
    sign. As written, the result is ``direction(..., repulsion=-1)``; summing over axis 1 instead
    (``mended=True``) gives ``direction(...)``.
    """
    diff = particles[None, :, :] - particles[:, None, :]
    dist_sq = (diff**2).sum(-1)
    weights = jnp.exp(-dist_sq / (2 * bandwidth))
    grad_weights = -diff / bandwidth * weights[..., None]
    repulsion = grad_weights.sum(1 if mended else 0)
    return (weights @ scores + repulsion) / particles.shape[0]


def median_bandwidth(particles: jax.Array) -> jax.Array:
    """max(med, 1e-5) / max(log N, 1) by sorting all N^2 squared distances.

    ``med`` is the lower median, element (N^2 - 1) // 2 of the sorted distances, the zeros of the
    diagonal counted, as ``torch.median`` has it.
    """
    n = particles.shape[0]
    difference = particles[:, None, :] - particles[None, :, :]
    ordered = jnp.sort(jnp.sum(difference**2, axis=-1).reshape(-1))
    median = ordered[(n * n - 1) // 2]
    return jnp.maximum(median, 1e-5) / max(math.log(n), 1.0)
