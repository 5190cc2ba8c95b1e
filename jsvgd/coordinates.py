"""The coordinates in which pairs are computed, and whether they keep enough digits there.

Particles are centred and divided by the square root of the bandwidth: z = (x - centre) h^-1/2. Pair
distances by products, |z_i|^2 + |z_j|^2 - 2 z_i.z_j, then lose about |z|^2 / 2 units of rounding; beyond
``FAR`` pairs are computed from differences of the raw particles instead.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

__all__ = [
    "FAR",
    "FAR_BACKWARD",
    "FAR_BACKWARD_COARSE",
    "FAR_COARSE",
    "Raw",
    "Standardised",
    "any_beyond",
    "compute_dtype",
    "half_reach",
    "is_beyond",
    "middle",
    "raw",
    "standardise",
]

# Above this max|z|^2 / 2 the expansion |x|^2 + |y|^2 - 2xy has lost more than ten of its bits. The
# gradient in a bandwidth is a sum over z dz that cancels as well: with clusters at the limit of the
# direction, its error was 1e-3 in float32.
FAR, FAR_BACKWARD = 1000.0, 100.0

# The same where products are made of 16-bit parts that keep 16 bits of a particle, and not 22 or 24: in
# the Gram form the direction erred by 4e-3 at 950 and by 4e-4 at 100.
FAR_COARSE, FAR_BACKWARD_COARSE = 100.0, 25.0

# Particles whose mean is the centre, in even steps over all of them.
CENTRE = 1024

# Particles whose median is the middle: fewer than half of them may be anywhere.
MIDDLE = 63


def compute_dtype(*arrays):
    """float64 where the inputs are, float32 for everything narrower."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


class Raw(NamedTuple):
    """The inputs in the dtype of the computation, scale = h^-1/2 and drift = repulsion h^-1/2, (d,)."""

    queries: jax.Array | None  # None: the particles
    particles: jax.Array
    scores: jax.Array
    scale: jax.Array
    drift: jax.Array


class Standardised(NamedTuple):
    """z = (x - centre) scale for queries and particles, raw scores, drift."""

    queries: jax.Array | None  # None: the particles
    particles: jax.Array
    scores: jax.Array
    drift: jax.Array


def raw(particles, scores, bandwidth, queries, repulsion) -> Raw:
    """The inputs of the operation in its compute dtype."""
    dtype = compute_dtype(particles, scores)
    x, s, h = (a.astype(dtype) for a in (particles, scores, bandwidth))
    y = None if queries is None else queries.astype(dtype)
    scale = jnp.broadcast_to(lax.rsqrt(h), (x.shape[1],))
    return Raw(y, x, s, scale, repulsion * scale)


def standardise(raw: Raw) -> Standardised:
    """Centre first (phi is translation invariant, rounding is not), then scale by the bandwidth."""
    # Any centre gives the same phi: it carries no derivative, and the mean of some particles serves, where
    # that of all is a launch of its own that a GPU is slow at. But particles and queries must have the
    # same one to the bit: XLA may fuse the mean's division with the subtraction into one multiply-add
    # for one of them only. A centre rounded by one bit more leaves it nothing to contract.
    some = raw.particles[:: max(1, raw.particles.shape[0] // CENTRE)]
    mean = lax.stop_gradient(jnp.mean(some, axis=0))
    exponent, mantissa = jnp.finfo(mean.dtype).nexp, jnp.finfo(mean.dtype).nmant
    centre = lax.reduce_precision(mean, exponent, mantissa - 1)
    z = (raw.particles - centre) * raw.scale
    y = None if raw.queries is None else (raw.queries - centre) * raw.scale
    return Standardised(y, z, raw.scores, raw.drift)


def half_reach(a: Standardised) -> jax.Array:
    """max |z|^2 / 2 over particles and queries; those lost to NaN have no say."""
    return functools.reduce(jnp.fmax, [jnp.nanmax(norms) for norms in _half_norms(a)])


def is_beyond(limit: float, a: Standardised) -> jax.Array:
    """Whether some |z|^2 / 2 is not within the limit, as when it is NaN."""
    within = [jnp.max(norms) <= limit for norms in _half_norms(a)]
    return ~functools.reduce(jnp.logical_and, within)


def _half_norms(a: Standardised) -> list[jax.Array]:
    sets = [lax.stop_gradient(z) for z in (a.queries, a.particles) if z is not None]
    return [0.5 * jnp.sum(z * z, axis=1) for z in sets]


def any_beyond(limit: float, half_reach) -> jax.Array:
    """Whether half_reach is beyond the limit; under vmap one answer, for all problems of the batch.

    A batched ``lax.cond`` would run both of its branches. The far path is right for near particles too.
    """
    return _any_positive(half_reach - limit)


@jax.custom_batching.custom_vmap
def _any_positive(excess):
    return excess > 0


@_any_positive.def_vmap
def _any_of_the_batch(axis_size, in_batched, excess):
    # A chain that is lost to NaN has no say.
    del axis_size, in_batched
    return _any_positive(jnp.nanmax(excess, axis=0)), False


def middle(x: jax.Array) -> jax.Array:
    """A point (d,) amid most of the rows, whatever a few do: the median of some, coordinate by coordinate."""
    some = x[:: -(-x.shape[0] // MIDDLE)]
    return lax.stop_gradient(jnp.sort(some, axis=0)[some.shape[0] // 2])
