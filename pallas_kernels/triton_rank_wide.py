"""A pass that cuts each bracket into 1024 bins of 2^s integers: three of them end any search.

A tile with few distances inside a bracket adds them bin by bin. Another makes its histogram on the tensor
cores, from the two digits of each distance's bin:

    count[h, l] = sum_ij [high digit of ij is h] [low digit of ij is l]
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.triton_rank_bracket import power_of_two, to_u
from pallas_kernels.triton_rank_tiles import walk_tiles

DIGIT = 32  # values of one of the two digits
DIGIT_BITS = power_of_two(DIGIT)
BINS = DIGIT * DIGIT
BITS = 2 * DIGIT_BITS
# Distances inside, in one tile, beyond which it makes a histogram: from 2 to 16 no slower, 40 is (measured as
# in `triton_rank_plan`).
MANY = 8


def last_of_bins(bracket):
    """(BINS,) the last integer of each bin."""
    ends = bracket.low + ((jnp.arange(BINS) + 1) << _shift(bracket))
    return jnp.minimum(ends, bracket.high)


def _shift(bracket):
    """The s of the width of the bins."""
    beyond = (bracket.high - bracket.low - 1) >> BITS
    bits = jnp.arange(32)  # of beyond
    return jnp.sum(((beyond >> bits) > 0).astype(jnp.int32))


def count_bins(distances, walk, brackets, counts_ref):
    """Adds one program's part to counts_ref, (1, R, DIGIT, DIGIT) float32 of each rank, high and low digit.

    Args:
      distances, walk: as in `walk_tiles`.
    """
    zero = 0 * walk[0]

    def visit(distance, carry):
        u = to_u(distance)
        for q, bracket in enumerate(brackets):
            add_tile(counts_ref, zero + q, u, bracket)
        return carry

    walk_tiles(distances, walk, visit, ())


def add_tile(counts_ref, q, u, bracket):
    """Adds a tile's distances u, (B, B) int32, inside the bracket of rank q to their bins."""
    inside = (u > bracket.low) & (u <= bracket.high) & bracket.open()
    many = _number(inside) > MANY
    bins = (u - bracket.low - 1) >> _shift(bracket)
    pl.when(~many)(lambda: _add_each(counts_ref, q, bins, inside))
    pl.when(many)(lambda: _add_all(counts_ref, q, bins, inside))


def _add_each(counts_ref, q, bins, inside):
    """Bin by bin, those that tie in one at once."""

    def first(condition):
        return jnp.min(jnp.min(jnp.where(condition, bins, BINS), axis=1))

    def take(place):
        found = _number(inside & (bins == place))
        at = (0 * q, q, place >> DIGIT_BITS, place & (DIGIT - 1))
        plt.atomic_add(counts_ref, at, found.astype(jnp.float32))
        return first(inside & (bins > place))

    lax.while_loop(lambda place: place < BINS, take, first(inside))


def _add_all(counts_ref, q, bins, inside):
    """All bins, column by column of the tile; -1 has a high digit that matches none."""
    bins = jnp.where(inside, bins, -1)
    columns, digits = jnp.arange(bins.shape[1])[None, :], jnp.arange(DIGIT)

    def add(j, total):
        column = jnp.sum(jnp.where(columns == j, bins, 0), axis=1)
        high, low = column >> DIGIT_BITS, column & (DIGIT - 1)
        return total + lax.dot_general(
            jnp.where(digits[:, None] == high[None, :], 1.0, 0.0).astype(jnp.bfloat16),
            jnp.where(low[:, None] == digits[None, :], 1.0, 0.0).astype(jnp.bfloat16),
            (((1,), (0,)), ((), ())),
            precision=lax.Precision.DEFAULT,
            preferred_element_type=jnp.float32,
        )

    total = lax.fori_loop(0, bins.shape[1], add, jnp.zeros((DIGIT, DIGIT), jnp.float32))
    every = pl.ds(0 * q, DIGIT)
    plt.atomic_add(counts_ref, (0 * q, q, every, every), total)


def _number(condition):
    return jnp.sum(jnp.sum(condition.astype(jnp.int32), axis=1))
