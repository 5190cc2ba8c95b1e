"""Is the sample right, and has it collapsed? Streamed: memory grows with N d, never with N^2.

Kernel Stein discrepancy (Liu, Lee and Jordan, 2016; Gorham and Mackey, 2017), maximum mean
discrepancy (Gretton et al., 2012), and the signs of a collapsed set of particles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jsvgd import pair_arithmetic, stein_terms
from jsvgd.arguments import check_bandwidth, check_matrix
from jsvgd.bandwidth import BandwidthSchedule, resolve_bandwidth
from jsvgd.bandwidth_rule import BandwidthRule
from jsvgd.composite import as_kernel
from jsvgd.kernels import Kernel, RadialKernel, get_kernel
from jsvgd.stein_kernel import by_digits, row_sums, squared_distances, stein_kernel
from jsvgd.streamed import map_row_blocks

__all__ = [
    "CollapseSummary",
    "collapse_summary",
    "ksd",
    "ksd_contributions",
    "laplace_variance",
    "mmd",
]


def ksd(
    particles: jax.Array,
    scores: jax.Array,
    *,
    bandwidth="median_distance",
    kernel: str | Kernel | Callable = "imq",
    statistic: str = "v",
) -> jax.Array:
    """Kernel Stein discrepancy between particles and the density that the scores belong to.

    statistic "v": sqrt(1/N^2 sum_ij k_p(x_i, x_j)), the discrepancy itself, never negative.
    statistic "u": 1/(N (N-1)) sum_{i != j} k_p(x_i, x_j), an unbiased estimate of the SQUARED
    discrepancy, without a root: it may be negative. (k_p: see ``jsvgd.stein_kernel``.)

    Args:
      particles: (N, d).
      scores: (N, d), grad log p at the particles.
      bandwidth: h, in any form that ``resolve_bandwidth`` takes; the length scale of the kernel is
        sqrt(h). By default sqrt(h) is the median distance between particles, or 1 where that is 0.
      kernel: "imq", (1 + |x - y|^2 / h)^(-1/2); "rbf", exp(-|x - y|^2 / (2 h)); any other kernel of
        ``svgd_direction``: a ``RadialKernel``, "linear" (of the first two moments alone), a sum, a
        function k(x, y). The rbf kernel misses divergence in many dimensions.
      statistic: "v" or "u".

    Returns:
      A scalar, differentiable in particles, scores and bandwidth.

    Raises:
      ValueError: for shapes that do not fit, an unknown statistic, or "u" with one particle.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.linspace(-2.0, 2.0, 7)[:, None]
      >>> round(float(ksd(x, -x, bandwidth=1.0)), 4)
      0.404
    """
    mean = jnp.mean(
        ksd_contributions(
            particles, scores, bandwidth=bandwidth, kernel=kernel, statistic=statistic
        )
    )
    return _root(mean) if statistic == "v" else mean


def ksd_contributions(
    particles: jax.Array,
    scores: jax.Array,
    *,
    bandwidth="median_distance",
    kernel: str | Kernel | Callable = "imq",
    statistic: str = "v",
) -> jax.Array:
    """What each particle adds: (N,) means over j of k_p(x_i, x_j), for "u" over j != i.

    Their mean is the squared discrepancy. The particles with the largest are the worst placed.
    Arguments as in ``ksd``.
    """
    x, s = check_particles_and_scores(particles, scores)
    n = x.shape[0]
    _check_statistic(statistic, "particles", n)
    kernel = as_kernel(kernel)
    if not isinstance(kernel, RadialKernel):

        def radial(term):
            return ksd_contributions(x, s, bandwidth=bandwidth, kernel=term, statistic=statistic)

        return stein_terms.contributions(radial, x, s, kernel=kernel, statistic=statistic)
    return _radial_contributions(x, s, resolved_bandwidth(bandwidth, x), kernel, statistic)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _radial_contributions(x, s, h, kernel: RadialKernel, statistic) -> jax.Array:
    n, d = x.shape

    def sums_of_rows(far):
        stein = stein_kernel(x, s, h, kernel, far=far)
        return row_sums(
            lambda rows: stein(x[rows], s[rows]), n, n, d, far=far, without_diagonal=True
        )

    sums = by_digits(x, h, sums_of_rows)
    if statistic == "u":
        return sums / (n - 1)
    slope_at_zero = kernel.slope(jnp.zeros((), x.dtype))
    trace = jnp.sum(jnp.broadcast_to(1 / h, (d,)))
    diagonal = kernel.profile(jnp.zeros((), x.dtype)) * jnp.sum(s * s, axis=1)
    return (sums + diagonal + slope_at_zero * trace) / n


def mmd(
    x: jax.Array,
    y: jax.Array,
    *,
    bandwidth="median_distance",
    kernel: str | RadialKernel = "rbf",
    statistic: str = "v",
) -> jax.Array:
    """Maximum mean discrepancy between two samples.

    statistic "v": sqrt(mean k(x, x') + mean k(y, y') - 2 mean k(x, y)), all pairs, never negative.
    statistic "u": the unbiased estimate of the SQUARED discrepancy (no pair of a point with
    itself), without a root: it may be negative.

    Args:
      x: (N, d).
      y: (M, d).
      bandwidth: h, in any form that ``resolve_bandwidth`` takes, resolved on both samples
        together; by default sqrt(h) is the median distance.
      kernel: "rbf", "imq" or a ``RadialKernel``.
      statistic: "v" or "u".

    Returns:
      A scalar, differentiable in x, y and bandwidth.
    """
    x, y = _floating("x", x), _floating("y", y)
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"y must have shape (M, {x.shape[1]}) like x, got {y.shape}")
    _check_statistic(statistic, "x", x.shape[0])
    _check_statistic(statistic, "y", y.shape[0])
    kernel = get_kernel(kernel)
    both = jnp.concatenate([x, y])
    h = resolved_bandwidth(bandwidth, both)
    squared = _squared_mmd(both, h, x.shape[0], kernel, statistic)
    return _root(jnp.maximum(squared, 0)) if statistic == "v" else squared


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _squared_mmd(both, h, size, kernel: RadialKernel, statistic) -> jax.Array:
    """The squared discrepancy of the first `size` points and the others."""
    d = both.shape[1]

    def squared_discrepancy(far):
        # One centre for both: distances between the samples must survive it.
        scaled = both if far else (both - lax.stop_gradient(jnp.mean(both, axis=0))) / jnp.sqrt(h)
        direct = pair_arithmetic.direct(1 / jnp.sqrt(h))

        def mean(a, b, same):
            n, m = a.shape[0], b.shape[0]

            def block(rows):
                if far:
                    return kernel.profile(direct.half_squared_distances(a[rows], b, None))
                return kernel.profile(squared_distances(a[rows], b) / 2)

            total = jnp.mean(row_sums(block, n, m, d, far=far, without_diagonal=same))
            if not same:
                return total / m
            if statistic == "u":
                return total / (m - 1)
            return (total + kernel.profile(jnp.zeros((), a.dtype))) / m

        x, y = scaled[:size], scaled[size:]
        return mean(x, x, True) + mean(y, y, True) - 2 * mean(x, y, False)

    return by_digits(both, h, squared_discrepancy)


class CollapseSummary(NamedTuple):
    """Signs of collapse.

    Attributes:
      variance_ratio: (d,) variance of the particles (divided by N) over the reference; well below
        1 means collapse. None without a reference.
      smallest_distance: the smallest distance between two particles; infinite for one particle.
      coincident_fraction: share of the particles that lie on another one.
    """

    variance_ratio: jax.Array | None
    smallest_distance: jax.Array
    coincident_fraction: jax.Array


def collapse_summary(
    particles: jax.Array, reference_variance=None, *, tolerance: float = 0.0
) -> CollapseSummary:
    """How far a set of particles has collapsed.

    Args:
      particles: (N, d).
      reference_variance: variance of each coordinate under the target: a scalar, (d,), or the
        diagonal of a (d, d) covariance; from a long MCMC run, or ``laplace_variance``.
      tolerance: particles this close, or closer, count as coincident.

    Returns:
      ``CollapseSummary``.
    """
    x = _floating("particles", particles)
    n, d = x.shape
    ratio = None
    if reference_variance is not None:
        reference = jnp.asarray(reference_variance, x.dtype)
        if reference.shape not in ((), (d,), (d, d)):
            raise ValueError(
                f"reference_variance must be a scalar or have shape ({d},) or ({d}, {d}), "
                f"got {reference.shape}"
            )
        if reference.ndim == 2:
            reference = jnp.diagonal(reference)
        ratio = jnp.var(x, axis=0) / reference
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")

    # In units of the extent, or squares of tiny and of huge distances would be 0 and infinite.
    extent = jnp.max(jnp.abs(x - x[0]))
    extent = jnp.where((extent > 0) & (extent < jnp.inf), extent, 1)

    def nearest(rows):
        squared = jnp.sum(((x[rows][:, None] - x) / extent) ** 2, axis=2)
        return jnp.min(jnp.where(rows[:, None] == jnp.arange(n), jnp.inf, squared), axis=1)

    distance = extent * jnp.sqrt(map_row_blocks(nearest, (jnp.arange(n),), n * d))
    return CollapseSummary(ratio, jnp.min(distance), jnp.mean(distance <= tolerance))


def laplace_variance(logdensity_fn: Callable, mode: jax.Array) -> jax.Array:
    """Variances of Laplace's approximation: the diagonal of (-Hessian of log p)^-1 at the mode.

    Args:
      logdensity_fn: of one position (d,).
      mode: (d,), where the gradient vanishes and the Hessian is negative definite.

    Returns:
      (d,); not finite or negative where ``mode`` is no maximum.
    """
    mode = jnp.asarray(mode)
    if mode.ndim != 1:
        raise ValueError(f"mode must have shape (d,), got {mode.shape}")
    return jnp.diagonal(jnp.linalg.inv(-jax.hessian(logdensity_fn)(mode)))


def _root(squared) -> jax.Array:
    """sqrt with gradient 0 at 0."""
    positive = squared > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squared, 1)), squared * 0)


def resolved_bandwidth(bandwidth, particles) -> jax.Array:
    """h of these particles; where a rule gives 0, since more than half of the pairs coincide, 1."""
    h = jnp.asarray(resolve_bandwidth(bandwidth, particles))
    if isinstance(bandwidth, (str, BandwidthRule, BandwidthSchedule)):
        h = jnp.where(h == 0, 1, h)
    return check_bandwidth(h, particles.shape[1]).astype(particles.dtype)


def _floating(name, value) -> jax.Array:
    value = check_matrix(name, value)
    return value.astype(jnp.promote_types(value.dtype, jnp.float32))


def check_particles_and_scores(particles, scores) -> tuple[jax.Array, jax.Array]:
    x, s = _floating("particles", particles), _floating("scores", scores)
    if s.shape != x.shape:
        raise ValueError(f"scores must have the shape of particles, {x.shape}, got {s.shape}")
    return x, s.astype(x.dtype)


def _check_statistic(statistic, name, n) -> None:
    if statistic not in ("v", "u"):
        raise ValueError(f'statistic must be "v" or "u", got {statistic!r}')
    if statistic == "u" and n < 2:
        raise ValueError(f'statistic "u" needs at least two {name}, got {n}')
