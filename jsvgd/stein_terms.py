"""The Stein kernel of kernels that are not radial, summed over rows; sums of kernels add up.

k_p(x, y) = s_x.s_y k + s_x.grad_y k + s_y.grad_x k + tr grad_x grad_y k
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jsvgd.composite import FunctionKernel, LinearKernel, terms_of
from jsvgd.kernels import Kernel, RadialKernel
from jsvgd.streamed import map_row_blocks

__all__ = ["contributions", "row_and_diagonal"]


def contributions(
    radial: Callable[[RadialKernel], jax.Array],
    particles: jax.Array,
    scores: jax.Array,
    *,
    kernel: Kernel,
    statistic: str,
) -> jax.Array:
    """(N,) means over j of k_p(x_i, x_j), over j != i for statistic "u".

    Args:
      radial: gives them for a radial kernel.
      particles, scores: (N, d).
      kernel: any ``Kernel``.
      statistic: "v" or "u".
    """
    n = particles.shape[0]
    total = jnp.zeros((n,), particles.dtype)
    for weight, term in terms_of(kernel):
        if isinstance(term, RadialKernel):
            rows = radial(term)
        else:
            rule = _linear if isinstance(term, LinearKernel) else _function
            rows, diagonal = rule(term, particles, scores)
            if statistic == "u":
                rows = (n * rows - diagonal) / (n - 1)
        total += jnp.asarray(weight, total.dtype) * rows
    return total


def row_and_diagonal(
    particles: jax.Array, scores: jax.Array, *, kernel: LinearKernel | FunctionKernel
) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    """A function of i that gives k_p(x_i, x_j) for all j, (N,), and k_p(x_i, x_i) for all i, (N,).

    Args:
      particles, scores: (N, d).
      kernel: one that is neither radial nor a sum.
    """
    if isinstance(kernel, LinearKernel):
        x, s = particles - kernel.origin(particles), scores
        own = jnp.sum(s * x, axis=1)

        def row(i):
            values = _product(s, s[i]) * (kernel.offset + _product(x, x[i]))
            return values + own + own[i] + x.shape[1]

        squares = jnp.sum(s * s, axis=1)
        return row, squares * (kernel.offset + jnp.sum(x * x, axis=1)) + 2 * own + x.shape[1]
    pair = _pair(kernel.function)

    def row(i):
        return jax.vmap(pair, (None, None, 0, 0))(particles[i], scores[i], particles, scores)

    return row, jax.vmap(pair)(particles, scores, particles, scores)


def _product(a, b):
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _linear(kernel: LinearKernel, particles, scores):
    """With M = mean_j s_j x_j^T, x about the origin of the kernel: O(N d^2), or O(N^2 d) if N < d.

    Their mean is offset |mean s|^2 + |M + I|^2: Stein's identity for the first two moments.
    """
    n, d = particles.shape
    x, s = particles - kernel.origin(particles), scores
    own = jnp.sum(s * x, axis=1)
    if d <= n:
        bilinear = jnp.sum(s * _product(x, _product(x.T, s) / n), axis=1)
    else:
        bilinear = jnp.mean(_product(s, s.T) * _product(x, x.T), axis=1)
    rows = kernel.offset * _product(s, jnp.mean(s, axis=0)) + bilinear + own + jnp.mean(own) + d
    squares = jnp.sum(s * s, axis=1)
    diagonal = squares * (kernel.offset + jnp.sum(x * x, axis=1)) + 2 * own + d
    return rows, diagonal


def _function(kernel: FunctionKernel, particles, scores):
    """By automatic differentiation, a block of rows at a time: O(N^2 d^2)."""
    pair = _pair(kernel.function)
    n, d = particles.shape

    def block(x, s):
        row = jax.vmap(pair, (None, None, 0, 0))
        return jnp.mean(jax.vmap(row, (0, 0, None, None))(x, s, particles, scores), axis=1)

    rows = map_row_blocks(block, (particles, scores), n * d * d)
    return rows, jax.vmap(pair)(particles, scores, particles, scores)


def _pair(k: Callable) -> Callable:
    """k_p(x, y) as a function of x, s_x, y, s_y."""

    def pair(x, s, y, t):
        mixed = jax.jacfwd(jax.grad(k), argnums=1)(x, y)
        return s @ t * k(x, y) + s @ jax.grad(k, 1)(x, y) + t @ jax.grad(k)(x, y) + jnp.trace(mixed)

    return pair
