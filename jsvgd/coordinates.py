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
    "Raw",
    "Standardised",
    "any_far",
    "compute_dtype",
    "half_reach",
    "raw",
    "standardise",
]

# Above this max|z|^2 / 2 the expansion |x|^2 + |y|^2 - 2xy has lost more than ten of its bits.
FAR = 1000.0


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
    # Any centre gives the same phi, so it carries no derivative. But particles and queries must have the
    # same one to the bit: XLA may fuse the mean's division with the subtraction into one multiply-add
    # for one of them only. A centre rounded by one bit more leaves it nothing to contract.
    mean = lax.stop_gradient(jnp.mean(raw.particles, axis=0))
    exponent, mantissa = jnp.finfo(mean.dtype).nexp, jnp.finfo(mean.dtype).nmant
    centre = lax.reduce_precision(mean, exponent, mantissa - 1)
    z = (raw.particles - centre) * raw.scale
    y = None if raw.queries is None else (raw.queries - centre) * raw.scale
    return Standardised(y, z, raw.scores, raw.drift)


def half_reach(a: Standardised) -> jax.Array:
    """max |z|^2 / 2 over particles and queries; those lost to NaN have no say."""
    sets = [z for z in (a.queries, a.particles) if z is not None]
    norms = [0.5 * jnp.nanmax(jnp.sum(z * z, axis=1)) for z in sets]
    return lax.stop_gradient(functools.reduce(jnp.fmax, norms))


@jax.custom_batching.custom_vmap
def any_far(half_reach):
    """Whether half_reach is beyond ``FAR``; under vmap one answer, for all problems of the batch.

    A batched ``lax.cond`` would run both of its branches. The far path is right for near particles too.
    """
    return half_reach > FAR


@any_far.def_vmap
def _any_of_the_batch(axis_size, in_batched, half_reach):
    # A chain that is lost to NaN has no say.
    del axis_size, in_batched
    return any_far(jnp.nanmax(half_reach, axis=0)), False
