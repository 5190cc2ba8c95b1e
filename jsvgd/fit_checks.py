"""What can be checked of particles from the target's scores alone, without knowing the posterior."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jsvgd.bandwidth import median_bandwidth
from jsvgd.diagnostics import ksd_contributions
from jsvgd.preconditioner import (
    centre,
    covariance_factor,
    diagonal_factor,
    from_whitened,
    to_whitened,
    whitened_scores,
)

__all__ = [
    "Diagnostics",
    "SplitCheck",
    "TargetCheck",
    "basin_check",
    "split_check",
    "target_check",
]


class Diagnostics(NamedTuple):
    """Figures behind the verdict of ``jsvgd.fit``; NaN where one does not apply.

    Attributes:
      num_particles, dimension, num_steps: N, d, steps made in all.
      mean_residual: largest over the whitened coordinates of |E[s]|: 0 at the posterior, about 1/sqrt(N)
        for independent draws, however correlated.
      spread_residual: largest of |1 + E[(z - mean) s]|: 0 at the posterior, where it is Stein's identity.
      sd_drift: largest |log| of the ratio of an sd at the end to that after half of the steps; NaN until
        the run is past half.
      ksd: kernel Stein discrepancy in whitened coordinates, rbf kernel of the median distance.
      ksd_ratio: its square over what independent draws have on average: 1 for those, below for particles
        that SVGD has placed evenly, far above where they are not the target's.
      movement: rms distance from the start, in the sds at the end.
      last_direction: rms of the last whitened direction, in sds. Small is no proof of convergence.
      turning: median cosine between successive directions over the last half; near -1 the steps overshoot.
      retries: blocks of steps that the guard has undone.
      step_factor: what it has left of the step size.
      lost: particles whose score is not finite.
      overflowed: particles that are not finite in the user's coordinates.
      split: share of the variance, in the most divided direction, that two groups explain: 0.64 for a
        normal distribution, 0.75 for a uniform one, near 1 for two far modes. NaN for N < 20.
      split_share: share of the particles in the smaller group.
      other_basin: share of the starting points that climb to another mode than most; 0 where all that
        arrive anywhere arrive at one.
    """

    num_particles: int
    dimension: int
    num_steps: int
    mean_residual: float
    spread_residual: float
    sd_drift: float
    ksd: float
    ksd_ratio: float
    movement: float
    last_direction: float
    turning: float
    retries: int
    step_factor: float
    lost: int
    overflowed: int
    split: float
    split_share: float
    other_basin: float


class TargetCheck(NamedTuple):
    """Stein's identity a whitened coordinate, (d,) each, and the kernel Stein discrepancy."""

    mean_residuals: jax.Array
    spread_residuals: jax.Array
    ksd: jax.Array
    ksd_ratio: jax.Array


@jax.jit
def target_check(particles: jax.Array, scores: jax.Array) -> TargetCheck:
    """How well particles (N, d) with their scores satisfy Stein's identity.

    In coordinates whitened by the covariance of the particles: coordinate by coordinate the noise of
    E[s] sd grows with the correlations. Where N <= d + 1 or the covariance is numerically singular
    each coordinate is divided by its standard deviation alone.
    """
    x = particles - centre(particles)
    factor = covariance_factor(particles)
    z, s = to_whitened(factor, x), whitened_scores(factor, scores)
    first, second = _stein_means(z, s)
    if factor.ndim == 2:
        sds = diagonal_factor(particles)
        # What a singular covariance whitens has not the covariance I.
        correlation = jnp.matmul(z.T, z, precision=jax.lax.Precision.HIGHEST) / (len(z) - 1)
        whitened = jnp.max(jnp.abs(correlation - jnp.eye(len(correlation)))) < 0.1
        plain = _stein_means(x / sds, scores * sds)
        first, second = (
            jnp.where(whitened, a, b) for a, b in zip((first, second), plain, strict=True)
        )
    h = median_bandwidth(z, rule="median_distance")
    squared = jnp.maximum(jnp.mean(ksd_contributions(z, s, bandwidth=h, kernel="rbf")), 0)
    # The mean over independent draws is that of the diagonal of the Stein kernel, over N.
    independent = (jnp.mean(jnp.sum(s * s, axis=1)) + z.shape[1] / h) / z.shape[0]
    return TargetCheck(first, second, jnp.sqrt(squared), squared / independent)


def _stein_means(z, s) -> tuple[jax.Array, jax.Array]:
    """E[s] and 1 + E[z s], (d,) each."""
    return jnp.mean(s, axis=0), 1 + jnp.mean(z * s, axis=0)


CLIMBERS, CLIMB_STEPS, LAST_STEPS = 100, 200, 30
# A group of end points counts from this share on, and where its log density is at most so much below the
# least probable particle.
SMALLEST_BASIN, DEPTH = 0.05, 10.0


class _Climb(NamedTuple):
    """End points z (M, d), whitened; whether they have come to rest; whether they are as probable."""

    z: jax.Array
    arrived: jax.Array
    probable: jax.Array


@functools.partial(jax.jit, static_argnums=0)
def _climb(density: Callable, start: jax.Array, particles: jax.Array) -> _Climb:
    """Gradient ascent from the starting points (M, d) in the whitened coordinates of the particles.

    Steps go along the gradient for a share of the distance from the particles' mean, falling from a tenth
    to a thousandth: at a mode they turn on the spot.
    """
    mean, factor = centre(particles), covariance_factor(particles)
    score = jax.vmap(jax.grad(density))

    def norm(rows):
        return jnp.sqrt(jnp.sum(rows**2, axis=1, keepdims=True))

    def step(i, carry):
        z, earlier, path = carry
        s = whitened_scores(factor, score(mean + from_whitened(factor, z)))
        s = jnp.where(jnp.isfinite(s), s, 0)
        reach = 0.1 * 0.01 ** (i / CLIMB_STEPS) * (1 + norm(z))
        last = i >= CLIMB_STEPS - LAST_STEPS
        earlier, path = jnp.where(last, earlier, z), path + jnp.where(last, reach, 0)
        return z + s * reach / (norm(s) + 1e-30), earlier, path

    z = to_whitened(factor, start - mean)
    z, earlier, path = jax.lax.fori_loop(0, CLIMB_STEPS, step, (z, z, jnp.zeros_like(z[:, :1])))
    heights = jax.vmap(density)(mean + from_whitened(factor, z))
    least = jnp.min(jax.vmap(density)(particles))
    return _Climb(z, (norm(z - earlier) < 0.3 * path)[:, 0], heights > least - DEPTH)


def basin_check(density: Callable, start: jax.Array, particles: jax.Array) -> float:
    """Do the starting points lie in the basins of one mode? Share of those that do not.

    Up to 100 of them climb the log density. Where the end points of those that come to rest, as probable
    as the particles, form two groups four standard deviations of the particles apart, or more, there
    are two modes: SVGD may have brought all particles into one, which nothing in them shows.

    Args:
      density: log density of a vector (d,), hashable.
      start: starting points, (N, d).
      particles: (N, d), finite.
    """
    climb = _climb(density, start[:CLIMBERS], particles)
    z = np.asarray(climb.z, np.float64)[np.asarray(climb.arrived & climb.probable)]
    if len(z) < 4:
        return 0.0
    # The farthest point from the first, and the one farthest from that, are in two groups if any are.
    one = z[np.argmax(np.sum((z - z[0]) ** 2, axis=1))]
    distances = np.sqrt(np.sum((z - one) ** 2, axis=1))
    other = z[np.argmax(distances)]
    apart = distances.max()
    if apart < 4:
        return 0.0
    nearer = distances < np.sqrt(np.sum((z - other) ** 2, axis=1))
    within = max(
        np.sqrt(np.mean(np.sum((group - group.mean(axis=0)) ** 2, axis=1)))
        for group in (z[nearer], z[~nearer])
    )
    share = float(min(nearer.mean(), 1 - nearer.mean()))
    return share if within < apart / 8 and share >= SMALLEST_BASIN else 0.0


class SplitCheck(NamedTuple):
    """The most divided direction among the coordinates and the leading principal components."""

    explained: float
    smaller_share: float


def split_check(particles: np.ndarray, *, smallest_share: float = 0.05) -> SplitCheck:
    """Looks for two groups by the best split in two along one direction at a time.

    Args:
      particles: (N, d), finite.
      smallest_share: of the particles that counts as a group.
    """
    x = np.asarray(particles, np.float64)
    n, d = x.shape
    sds = x.std(axis=0)
    z = (x - x.mean(axis=0)) / np.where(sds > 0, sds, 1)
    directions = [z]
    if 1 < d <= 1000 and n > 3 * d:  # fewer points fall in two along some direction by chance
        _, vectors = np.linalg.eigh(z.T @ z / n)
        directions.append(z @ vectors[:, -3:])
    columns = np.sort(np.concatenate(directions, axis=1), axis=0)
    least = max(1, round(smallest_share * n))
    if n < 20:
        return SplitCheck(float("nan"), float("nan"))
    sizes = np.arange(1, n)[:, None]
    sums = np.cumsum(columns, axis=0)[:-1]
    means = columns.mean(axis=0)
    # Sum of squares between the groups of a split after the first `size` particles.
    between = (sums - sizes * means) ** 2 * n / (sizes * (n - sizes))
    total = np.sum((columns - means) ** 2, axis=0)
    explained = (between / np.where(total > 0, total, np.inf))[least - 1 : n - least]
    place, column = np.unravel_index(np.argmax(explained), explained.shape)
    size = place + least
    return SplitCheck(float(explained[place, column]), float(min(size, n - size) / n))
