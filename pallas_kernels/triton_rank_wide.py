"""A pass that cuts each bracket into 1024 bins of 2^s integers: three of them end any search.

A tile with few distances inside a bracket adds each to its bin by itself. Another makes its histogram on the
tensor cores, from the two digits of each distance's bin:

    count[h, l] = sum_ij [high digit of ij is h] [low digit of ij is l]

so that a pass costs no more than some tens of microseconds whatever the distances: by threshold, 1024 of
them would cost hundreds (measured on one H200, 1024 particles).
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.triton_rank_bracket import NONE, power_of_two, to_u
from pallas_kernels.triton_rank_tiles import walk_tiles

DIGIT = 32  # values of one of the two digits
BINS = DIGIT * DIGIT
BITS = power_of_two(BINS)
MANY = 8  # distances inside, in one tile, beyond which the histogram takes no longer


def bins_within(bracket):
    """(BINS,) the last integer of each bin, and the s of their width."""
    beyond = (bracket.high - bracket.low - 1) >> BITS
    shift = jnp.sum(((beyond >> jnp.arange(DIGIT)) > 0).astype(jnp.int32))
    return jnp.minimum(bracket.low + ((jnp.arange(BINS) + 1) << shift), bracket.high), shift


def count_bins(distances, walk, brackets, counts_ref):
    """Adds one program's part to counts_ref, (1, R, DIGIT, DIGIT) float32 of each rank, high and low digit.

    Args: as in `triton_rank_count.count_below`.
    """
    zero = 0 * walk[0]

    def visit(distance, carry):
        u = to_u(distance)
        for q, bracket in enumerate(brackets):
            _, shift = bins_within(bracket)
            inside = (u > bracket.low) & (u <= bracket.high)
            one_by_one = lambda q=q, bracket=bracket, shift=shift, inside=inside: _add_each(
                counts_ref, zero + q, u, inside, bracket, shift
            )
            together = lambda q=q, bracket=bracket, shift=shift, inside=inside: _add_all(
                counts_ref, zero + q, u, inside, bracket, shift
            )
            many = _number(inside) > MANY
            pl.when(~many)(one_by_one)
            pl.when(many)(together)
        return carry

    walk_tiles(distances, walk, visit, ())


def _add_each(counts_ref, q, u, inside, bracket, shift):
    def least(condition):
        return jnp.min(jnp.min(jnp.where(condition, u, NONE), axis=1))

    def take(value):
        found = _number(u == value)
        place = (value - bracket.low - 1) >> shift
        at = (0 * q, q, place // DIGIT, place % DIGIT)
        plt.atomic_add(counts_ref, at, found.astype(jnp.float32))
        return least(inside & (u > value))

    lax.while_loop(lambda value: value < NONE, take, least(inside))


def _add_all(counts_ref, q, u, inside, bracket, shift):
    place = jnp.where(inside, (u - bracket.low - 1) >> shift, -1)
    columns, digits = jnp.arange(u.shape[1])[None, :], jnp.arange(DIGIT)

    def add(j, total):
        column = jnp.sum(jnp.where(columns == j, place, 0), axis=1)
        high, low = column >> power_of_two(DIGIT), column & (DIGIT - 1)
        return total + lax.dot_general(
            jnp.where(digits[:, None] == high[None, :], 1.0, 0.0).astype(jnp.bfloat16),
            jnp.where(low[:, None] == digits[None, :], 1.0, 0.0).astype(jnp.bfloat16),
            (((1,), (0,)), ((), ())),
            precision=lax.Precision.DEFAULT,
            preferred_element_type=jnp.float32,
        )

    total = lax.fori_loop(0, u.shape[1], add, jnp.zeros((DIGIT, DIGIT), jnp.float32))
    every = pl.ds(0 * q, DIGIT)
    plt.atomic_add(counts_ref, (0 * q, q, every, every), total)


def _number(condition):
    return jnp.sum(jnp.sum(condition.astype(jnp.int32), axis=1))
