"""The SVGD direction through XLA: row blocks streamed over all particles, O(N d) memory.

All arrays here are standardised: z = (x - centre) / sqrt(h), so that u_ij = |z_i - z_j|^2 / 2 and, with
c = repulsion / sqrt(h),

    phi_i = 1/N sum_j [ f(u_ij) s_j + w(u_ij) c (z_i - z_j) ],    w = -f'.

A block of rows sees every particle, so each output row has one owner and nothing is accumulated across
blocks. Where N is small and d large (a Bayesian network), one block holds all rows and this is the Gram
form: one product Z Z^T, one product K V.

Two ways to do the arithmetic of a pair (``PairArithmetic``): by products, |z_i|^2 + |z_j|^2 - 2 z_i.z_j,
which is what matrix units are for and loses digits once |z|^2 is large; and by direct differences of the
raw particles, which is exact however far they lie apart, at the price of N^2 d elementwise work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jsvgd.kernels import RBF, RadialKernel

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


class PairArithmetic(NamedTuple):
    """How to get from rows q (B, d) and all particles z (N, d) to pair quantities and back.

    Attributes:
      half_squared_distances: (q, z, precision) -> u (B, N).
      project: (a (B, d), q, z, precision) -> a_i . (q_i - z_j), (B, N).
      project_back: (a (N, d), q, z, precision) -> a_j . (z_j - q_i), (B, N).
      contract: (weights (B, N), q, z, precision) -> sum_j weights_ij (q_i - z_j), (B, d).
      moments: (``BackwardBlock``, z, drift) -> rows (B, d) whose sums are the gradients in the drift
        and in the logarithm of the scale.
      elements_a_pair: how many numbers of scratch a pair may cost, for a given d.
    """

    half_squared_distances: Callable
    project: Callable
    project_back: Callable
    contract: Callable
    moments: Callable
    elements_a_pair: Callable[[int], int]


def _product(a, b, precision):
    return jnp.matmul(a, b, precision=precision)


def _half_squared_by_products(q, z, precision):
    q_norms, z_norms = (0.5 * jnp.sum(a * a, axis=1) for a in (q, z))
    return jnp.maximum(q_norms[:, None] + z_norms[None, :] - _product(q, z.T, precision), 0.0)


def _project_by_products(a, q, z, precision):
    return jnp.sum(a * q, axis=1)[:, None] - _product(a, z.T, precision)


def _project_back_by_products(a, q, z, precision):
    return jnp.sum(a * z, axis=1)[None, :] - _product(q, a.T, precision)


def _contract_by_products(weights, q, z, precision):
    return jnp.sum(weights, axis=1)[:, None] * q - _product(weights, z, precision)


class BackwardBlock(NamedTuple):
    """What a block of rows of the backward pass has at hand for ``PairArithmetic.moments``."""

    z: jax.Array
    g: jax.Array
    slope: jax.Array
    symmetric: jax.Array
    exchange: jax.Array
    d_particles: jax.Array


def _moments_by_products(block: BackwardBlock, z, drift):
    del z, drift
    return block.z * block.exchange, block.z * block.d_particles


PRODUCTS = PairArithmetic(
    _half_squared_by_products,
    _project_by_products,
    _project_back_by_products,
    _contract_by_products,
    _moments_by_products,
    lambda d: 1,
)


def direct(scale: jax.Array | float = 1.0) -> PairArithmetic:
    """Arithmetic by differences of unscaled particles x, z_i - z_j = scale (x_i - x_j).

    Differences come first, scaling second: near pairs of a far cluster keep all their digits.
    """

    def differences(q, x):
        return scale * (q[:, None, :] - x[None, :, :])

    def half_squared_distances(q, x, precision):
        del precision
        return 0.5 * jnp.sum(differences(q, x) ** 2, axis=2)

    def project(a, q, x, precision):
        del precision
        return jnp.sum(a[:, None, :] * differences(q, x), axis=2)

    def project_back(a, q, x, precision):
        del precision
        return -jnp.sum(a[None, :, :] * differences(q, x), axis=2)

    def contract(weights, q, x, precision):
        del precision
        return jnp.sum(weights[:, :, None] * differences(q, x), axis=1)

    def moments(block: BackwardBlock, x, drift):
        # sum_i z_i dz_i cancels where |z| is large; these are the same sums over differences.
        difference = differences(block.z, x)
        d_drift = block.g * jnp.sum(block.slope[:, :, None] * difference, axis=1)
        spread = jnp.sum(block.symmetric[:, :, None] * difference**2, axis=1)
        return d_drift, drift * d_drift - 0.5 * spread

    return PairArithmetic(
        half_squared_distances, project, project_back, contract, moments, lambda d: d
    )


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
            return own + _product(weights, scores - drift * particles, precision)
        push = pairs.contract(kernel.slope(u), q, particles, precision)
        return _product(weights, scores, precision) + drift * push

    return map_row_blocks(block, (queries,), n * pairs.elements_a_pair(d)) / n


class Gradient(NamedTuple):
    """Gradients of the direction of particles on themselves.

    Attributes:
      particles: in z, (N, d).
      scores: in s, (N, d).
      drift: in c, (d,).
      log_scale: in log(scale) at a fixed drift, sum_i z_i dz_i, (d,); or its sum over the dimensions,
        (1,), where one bandwidth serves them all.
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
            drive = _product(g_i, values.T, precision) + _product(values_i, g.T, precision)
            own, own_i = jnp.sum(pull * particles, axis=1), jnp.sum(drift * g_i * z_i, axis=1)
            return slope * (drive + own_i[:, None] + own[None, :])
        drive = _product(g_i, scores.T, precision) + _product(s_i, g.T, precision)
        spread = pairs.project(drift * g_i, z_i, particles, precision)
        spread += pairs.project_back(pull, z_i, particles, precision)
        return slope * drive + kernel.curvature(u) * spread

    def block(z_i, s_i, g_i):
        u = pairs.half_squared_distances(z_i, particles, precision)
        weights, slope = kernel.profile(u), kernel.slope(u)
        symmetric = symmetric_weights(z_i, s_i, g_i, u, slope)
        d_scores = _product(weights, g, precision)
        slope_g = d_scores if kernel is RBF else _product(slope, g, precision)
        exchange = jnp.sum(slope, axis=1)[:, None] * g_i - slope_g
        d_particles = drift * exchange - pairs.contract(symmetric, z_i, particles, precision)
        rows = BackwardBlock(z_i, g_i, slope, symmetric, exchange, d_particles)
        d_drift, d_log_scale = pairs.moments(rows, particles, drift)
        if isotropic:
            spread = jnp.sum(symmetric * u, axis=1)
            d_log_scale = (jnp.sum(drift * d_drift, axis=1) - spread)[:, None]
        return d_particles, d_scores, d_drift, d_log_scale

    d_particles, d_scores, d_drift, d_log_scale = map_row_blocks(
        block, (particles, scores, g), n * pairs.elements_a_pair(d)
    )
    return Gradient(d_particles, d_scores, jnp.sum(d_drift, axis=0), jnp.sum(d_log_scale, axis=0))
