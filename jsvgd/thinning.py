"""Stein thinning: the few particles that represent the target best."""

from __future__ import annotations

import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jsvgd import stein_terms
from jsvgd.composite import as_kernel, terms_of
from jsvgd.diagnostics import check_particles_and_scores, resolved_bandwidth
from jsvgd.kernels import Kernel, RadialKernel
from jsvgd.stein_kernel import by_digits, stein_kernel

__all__ = ["stein_thinning"]


def stein_thinning(
    particles: jax.Array,
    scores: jax.Array,
    m: int,
    *,
    bandwidth="median_distance",
    kernel: str | Kernel | Callable = "imq",
) -> jax.Array:
    """Greedy choice of m particles that minimise the kernel Stein discrepancy.

    Each step takes the i that minimises k_p(x_i, x_i) / 2 + sum_chosen k_p(x_i, x_j), the first
    of equals (Riabiz et al., 2022, algorithm 1). Time m N d, memory N d (both times d where the kernel is
    a function k(x, y)).

    Args:
      particles: (N, d).
      scores: (N, d), grad log p at the particles.
      m: how many to choose; a particle may be chosen more than once.
      bandwidth, kernel: as in ``jsvgd.ksd``.

    Returns:
      (m,) int32 indices, in the order of choice.

    Raises:
      ValueError: for m < 1, shapes that do not fit and unknown names.
      TypeError: for a kernel that is none.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[3.0], [0.1], [-1.0], [1.2]])
      >>> stein_thinning(x, -x, 3, bandwidth=1.0).tolist()
      [1, 2, 3]
    """
    x, s = check_particles_and_scores(particles, scores)
    if not isinstance(m, numbers.Integral) or isinstance(m, bool) or m < 1:
        raise ValueError(f"m must be a whole number of at least 1, got {m!r}")
    terms = terms_of(as_kernel(kernel))
    weights = [jnp.asarray(weight, x.dtype) for weight, _ in terms]
    h = None
    if any(isinstance(term, RadialKernel) for _, term in terms):  # others have no bandwidth
        h = resolved_bandwidth(bandwidth, x)
    parts = [
        _radial(x, s, h, term)
        if isinstance(term, RadialKernel)
        else stein_terms.row_and_diagonal(x, s, kernel=term)
        for _, term in terms
    ]
    diagonal = sum(weight * own for weight, (_, own) in zip(weights, parts, strict=True))

    def choose(objective, _):
        index = jnp.argmin(objective).astype(jnp.int32)
        rows = [weight * row(index) for weight, (row, _) in zip(weights, parts, strict=True)]
        # The diagonal by its own formula: the expanded distance to itself is not quite zero.
        row = sum(rows).at[index].set(diagonal[index])
        return objective + row, index

    return lax.scan(choose, diagonal / 2, length=int(m))[1]


def _radial(x, s, h, kernel: RadialKernel):
    """As ``stein_terms.row_and_diagonal``, for a radial kernel of bandwidth h."""

    def row(index):
        def with_one(far):
            return stein_kernel(x, s, h, kernel, far=far)(x[index][None], s[index][None])[0]

        return by_digits(x, h, with_one)

    zero = jnp.zeros((), x.dtype)
    trace = jnp.sum(jnp.broadcast_to(1 / h, x.shape[1:]))
    diagonal = kernel.profile(zero) * jnp.sum(s * s, axis=1) + kernel.slope(zero) * trace
    return row, diagonal
