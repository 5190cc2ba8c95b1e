"""The SVGD direction through XLA: row blocks streamed over all particles, O(N d) memory.

All arrays here are standardised: z = (x - centre) / sqrt(h), so that u_ij = |z_i - z_j|^2 / 2 and, with
c = repulsion / sqrt(h),

    phi_i = 1/N sum_j [ f(u_ij) s_j + w(u_ij) c (z_i - z_j) ],    w = -f'.

A block of rows sees every particle, so each output row has one owner and nothing is accumulated across
blocks. Where N is small and d large (a Bayesian network), one block holds all rows and this is the Gram
form: one product Z Z^T, one product K V.

The arithmetic of a pair is that of ``jsvgd.pair_arithmetic``: by products, or by differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jsvgd.kernels import RBF, RadialKernel
from jsvgd.pair_arithmetic import PRODUCTS, BackwardBlock, PairArithmetic, direct, product

__all__ = [
    "PRODUCTS",
    "Gradient",
    "PairArithmetic",
    "backward",
    "direct",
    "forward",
    "map_row_blocks",
]

# Pair values of one block of rows: half a megabyte of float32 stays in a core's cache, but a block has
# some rows to amortise its pass over all particles with, unless they would take tens of megabytes.
# A GPU wants enough rows to fill its multiprocessors.
_BLOCK_ELEMENTS = {"cpu": 1 << 17, "gpu": 1 << 25}
_FEWEST_ROWS, _MOST_ELEMENTS = 64, {"cpu": 1 << 22, "gpu": 1 << 27}


def map_row_blocks(function: Callable, rows: tuple[jax.Array, ...], elements_a_row: int):
    """function(*rows), a block of rows at a time; its output has the same leading axis.

    Rows are padded to whole blocks with zeros, and what comes of the padding is dropped. Blocks are
    rematerialised in reverse mode, so that no pair quantity is ever stored.

    Args:
      function: maps arrays (B, ...) to an array or a tuple of arrays (B, ...), row by row.
      rows: arrays (M, ...).
      elements_a_row: numbers of scratch that one row costs.
    """
    function = jax.checkpoint(function)
    num_rows = rows[0].shape[0]
    platform = "gpu" if jax.default_backend() == "gpu" else "cpu"
    fewest = min(_FEWEST_ROWS, _MOST_ELEMENTS[platform] // elements_a_row)
    block = min(num_rows, max(1, fewest, _BLOCK_ELEMENTS[platform] // elements_a_row))
    if block == num_rows:
        return function(*rows)
    num_blocks = -(-num_rows // block)
    block = -(-num_rows // num_blocks)  # even blocks waste the fewest padded rows
    padding = num_blocks * block - num_rows

    def to_blocks(a):
        padded = jnp.pad(a, ((0, padding),) + ((0, 0),) * (a.ndim - 1))
        return padded.reshape(num_blocks, block, *a.shape[1:])

    blocks = lax.map(lambda args: function(*args), tuple(map(to_blocks, rows)))
    return jax.tree.map(lambda a: a.reshape(num_blocks * block, *a.shape[2:])[:num_rows], blocks)


def forward(
    queries: jax.Array | None,
    particles: jax.Array,
    scores: jax.Array,
    drift: jax.Array,
    *,
    kernel: RadialKernel,
    precision: lax.Precision,
    pairs: PairArithmetic = PRODUCTS,
) -> jax.Array:
    """phi at standardised queries (M, d), from standardised particles and raw scores (N, d).

    Queries default to the particles.

    Args:
      drift: c = repulsion / sqrt(h), (d,).
      kernel: the radial kernel.
      precision: of every matrix product.
      pairs: ``PRODUCTS``, or ``direct(scale)`` with unscaled queries and particles.

    Returns:
      (M, d).
    """
    n, d = particles.shape
    queries = particles if queries is None else queries

    def block(q):
        u = pairs.half_squared_distances(q, particles, precision)
        weights = kernel.profile(u)
        if kernel is RBF and pairs is PRODUCTS:
            # w = K: attraction and repulsion share one product with s_j - c z_j.
            own = jnp.sum(weights, axis=1)[:, None] * (drift * q)
            return own + product(weights, scores - drift * particles, precision)
        push = pairs.contract(kernel.slope(u), q, particles, precision)
        return product(weights, scores, precision) + drift * push

    return map_row_blocks(block, (queries,), n * pairs.elements_a_pair(d)) / n


class Gradient(NamedTuple):
    """Gradients of the direction of particles on themselves.

    Attributes:
      particles: in z, (N, d).
      scores: in s, (N, d).
      drift: in c, (d,).
      log_scale: in log(scale) at a fixed drift, sum_i z_i dz_i, (d,).

    Where one bandwidth serves all dimensions, the last two are summed over them, (1,).
    """

    particles: jax.Array
    scores: jax.Array
    drift: jax.Array
    log_scale: jax.Array


def backward(
    particles: jax.Array,
    scores: jax.Array,
    drift: jax.Array,
    cotangent: jax.Array,
    *,
    kernel: RadialKernel,
    precision: lax.Precision,
    pairs: PairArithmetic = PRODUCTS,
    isotropic: bool = False,
) -> Gradient:
    """Vector-Jacobian product of ``forward(z, z, s, c)``, in one pass of row owners.

    With g the cotangent over N, T_ij = w_ij g_i.s_j + f''_ij (c g_i).(z_i - z_j) is minus the derivative
    of the pair's contribution in u_ij. A row needs T_ij and T_ji, both of which it can form:

        dz_i = c (rowsum(w)_i g_i - sum_j w_ij g_j) - sum_j (T + T^T)_ij (z_i - z_j)
        ds_i = sum_j K_ij g_j
        dc   = sum_i z_i (rowsum(w)_i g_i - sum_j w_ij g_j)
        sum_i z_i.dz_i = c.dc - sum_ij (T + T^T)_ij u_ij

    Args:
      particles, scores, drift, kernel, precision, pairs: as in ``forward``.
      cotangent: (N, d).
      isotropic: one bandwidth serves all dimensions; its gradient then comes by the last line above,
        which keeps the digits that the sum over z_i dz_i loses for clusters far apart.
    """
    n, d = particles.shape
    g = cotangent / n
    pull = drift * g

    def symmetric_weights(z_i, s_i, g_i, u, slope):
        """T + T^T, (B, N)."""
        if kernel is RBF and pairs is PRODUCTS:
            # w = f'' = K: two products with v = s - c z instead of four.
            values, values_i = scores - drift * particles, s_i - drift * z_i
            drive = product(g_i, values.T, precision) + product(values_i, g.T, precision)
            own, own_i = jnp.sum(pull * particles, axis=1), jnp.sum(drift * g_i * z_i, axis=1)
            return slope * (drive + own_i[:, None] + own[None, :])
        drive = product(g_i, scores.T, precision) + product(s_i, g.T, precision)
        spread = pairs.project(drift * g_i, z_i, particles, precision)
        spread += pairs.project_back(pull, z_i, particles, precision)
        return slope * drive + kernel.curvature(u) * spread

    def block(z_i, s_i, g_i):
        u = pairs.half_squared_distances(z_i, particles, precision)
        weights, slope = kernel.profile(u), kernel.slope(u)
        symmetric = symmetric_weights(z_i, s_i, g_i, u, slope)
        d_scores = product(weights, g, precision)
        slope_g = d_scores if kernel is RBF else product(slope, g, precision)
        exchange = jnp.sum(slope, axis=1)[:, None] * g_i - slope_g
        d_particles = drift * exchange - pairs.contract(symmetric, z_i, particles, precision)
        rows = BackwardBlock(z_i, g_i, slope, symmetric, exchange, d_particles)
        d_drift, d_log_scale = pairs.moments(rows, particles, drift)
        if isotropic:
            spread = jnp.sum(symmetric * u, axis=1)
            d_log_scale = (jnp.sum(drift * d_drift, axis=1) - spread)[:, None]
            d_drift = jnp.sum(d_drift, axis=1, keepdims=True)
        return d_particles, d_scores, d_drift, d_log_scale

    d_particles, d_scores, d_drift, d_log_scale = map_row_blocks(
        block, (particles, scores, g), n * pairs.elements_a_pair(d)
    )
    return Gradient(d_particles, d_scores, jnp.sum(d_drift, axis=0), jnp.sum(d_log_scale, axis=0))
