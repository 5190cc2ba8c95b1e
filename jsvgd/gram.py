"""Few particles in many dimensions on compiled kernels: the N x N weights in between two passes over d.

A Bayesian network has tens or hundreds of particles and thousands to millions of dimensions. Then N^2
numbers are nothing beside N d, and phi is two products: Z Z^T, whose diagonal and entries give the weights,
and the weights times scores and particles. The kernels centre and scale while they read.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jsvgd.kernels import RadialKernel

__all__ = ["PairWeights", "direction", "pair_weights"]


class PairWeights(NamedTuple):
    """f(u_ij) and w(u_ij), (N, N), and the largest |z_i|^2 / 2, which tells how many digits they have."""

    profile: jax.Array
    slope: jax.Array
    half_squared_norm: jax.Array


def pair_weights(particles, scale, *, kernel: RadialKernel, precision, interpret) -> PairWeights:
    """Weights of all pairs of particles (N, d), with scale = h^-1/2, (d,)."""
    from pallas_kernels import triton_gram  # Pallas takes a second that CPU users need not wait

    # Any particle serves as the centre: phi does not depend on it, and none costs a pass over x.
    gram = triton_gram.gram(
        particles, particles[0], scale, precision=precision, interpret=interpret
    )
    norms = jnp.diagonal(gram)
    u = jnp.maximum(0.5 * (norms[:, None] + norms[None, :]) - gram, 0.0)
    return PairWeights(kernel.profile(u), kernel.slope(u), 0.5 * jnp.max(norms))


def direction(
    pairs: PairWeights,
    particles,
    scores,
    scale,
    drift,
    step_size=None,
    *,
    kernel: RadialKernel,
    precision,
    interpret,
) -> jax.Array:
    """phi, or particles + step_size * phi, (N, d)."""
    from pallas_kernels import triton_gram

    return triton_gram.combine(
        pairs.profile,
        pairs.slope,
        particles,
        scores,
        particles[0],
        scale,
        drift,
        kernel=kernel.name,
        precision=precision,
        base=step_size is not None,
        step=step_size,
        interpret=interpret,
    )
