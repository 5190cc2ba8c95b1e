"""The arithmetic of pairs of particles: squared distances, projections and sums over neighbours.

Two ways to do it (``PairArithmetic``): by products, |z_i|^2 + |z_j|^2 - 2 z_i.z_j, which is what matrix
units are for and loses digits once |z|^2 is large; and by direct differences of the raw particles, which
is exact however far they lie apart, at the price of N^2 d elementwise work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["PRODUCTS", "BackwardBlock", "PairArithmetic", "direct", "product"]

# Dimensions whose differences are taken at once: the rows of a block, cut to these, stay in the cache.
_CHUNK = 512


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


def product(a, b, precision):
    """a b, at that precision."""
    return jnp.matmul(a, b, precision=precision)


def _half_squared_by_products(q, z, precision):
    q_norms, z_norms = (0.5 * jnp.sum(a * a, axis=1) for a in (q, z))
    return jnp.maximum(q_norms[:, None] + z_norms[None, :] - product(q, z.T, precision), 0.0)


def _project_by_products(a, q, z, precision):
    return jnp.sum(a * q, axis=1)[:, None] - product(a, z.T, precision)


def _project_back_by_products(a, q, z, precision):
    return jnp.sum(a * z, axis=1)[None, :] - product(q, a.T, precision)


def _contract_by_products(weights, q, z, precision):
    return jnp.sum(weights, axis=1)[:, None] * q - product(weights, z, precision)


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

    Differences come first, scaling second: near pairs of a far cluster keep all their digits. Dimensions
    come in chunks, so that a pair costs no more scratch in a network's dimensions than in some hundred.
    """

    def differences(unit, q, x):
        return unit * (q[:, None, :] - x[None, :, :])

    def summed(term, q, x, *rows):
        """The sum over the dimensions of term(differences, *rows), (B, N)."""

        def sum_of_chunk(unit, q, x, *rows):
            return jnp.sum(term(differences(unit, q, x), *rows), axis=2)

        return _sum_over_chunks(sum_of_chunk, *_with_unit(scale, q, x), *rows)

    def half_squared_distances(q, x, precision):
        del precision
        return 0.5 * summed(jnp.square, q, x)

    def project(a, q, x, precision):
        del precision
        return summed(lambda difference, a: a[:, None, :] * difference, q, x, a)

    def project_back(a, q, x, precision):
        del precision
        return -summed(lambda difference, a: a[None, :, :] * difference, q, x, a)

    def contract(weights, q, x, precision):
        del precision

        def contract_chunk(unit, q, x):
            return jnp.sum(weights[:, :, None] * differences(unit, q, x), axis=1)

        return _map_over_chunks(contract_chunk, *_with_unit(scale, q, x))

    def moments(block: BackwardBlock, x, drift):
        # sum_i z_i dz_i cancels where |z| is large; these are the same sums over differences.
        def moments_of_chunk(unit, q, x, g, drift):
            difference = differences(unit, q, x)
            d_drift = g * jnp.sum(block.slope[:, :, None] * difference, axis=1)
            spread = jnp.sum(block.symmetric[:, :, None] * difference**2, axis=1)
            return d_drift, drift * d_drift - 0.5 * spread

        return _map_over_chunks(
            moments_of_chunk, *_with_unit(scale, block.z, x), block.g, drift[None, :]
        )

    return PairArithmetic(
        half_squared_distances, project, project_back, contract, moments, lambda d: min(d, _CHUNK)
    )


def _with_unit(scale, q, x):
    """The scale as a row (1, d), and both sets of particles."""
    return jnp.broadcast_to(scale, (1, x.shape[1])), q, x


def _sum_over_chunks(function: Callable, *arrays: jax.Array) -> jax.Array:
    """The sum of function(*chunks) over chunks of the last axis, which all arrays share."""
    if arrays[0].shape[-1] <= _CHUNK:
        return function(*arrays)
    function = jax.checkpoint(function)  # reverse mode keeps the chunks alone
    chunks = tuple(map(_to_chunks, arrays))
    shape = jax.eval_shape(function, *(a[0] for a in chunks))
    total = jnp.zeros(shape.shape, shape.dtype)
    return lax.scan(lambda total, chunk: (total + function(*chunk), None), total, chunks)[0]


def _map_over_chunks(function: Callable, *arrays: jax.Array):
    """function(*chunks) of every chunk of the last axis, put together along it."""
    d = arrays[0].shape[-1]
    if d <= _CHUNK:
        return function(*arrays)
    function = jax.checkpoint(function)
    out = lax.map(lambda chunk: function(*chunk), tuple(map(_to_chunks, arrays)))
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(a.shape[1], -1)[:, :d], out)


def _to_chunks(a: jax.Array) -> jax.Array:
    """(rows, d) as (chunks, rows, size of a chunk), filled up with zeros: those have no differences."""
    rows, d = a.shape
    num_chunks = -(-d // _CHUNK)
    padded = jnp.pad(a, ((0, 0), (0, num_chunks * _CHUNK - d)))
    return jnp.moveaxis(padded.reshape(rows, num_chunks, _CHUNK), 1, 0)
