"""Order statistics of the squared distances of all pairs of particles, exact and differentiable.

No distance matrix is sorted, and none is stored that grows beyond a constant: ``rank_search``
finds the answer by counting, in passes over the blocks of ``pairs``. The derivative is that of
the selected pair's squared distance, and the mean over the pairs that tie with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jsvgd.coordinates import middle
from jsvgd.pairs import (
    BlockKeys,
    from_key,
    masked_key,
    prepare,
    to_key,
)
from jsvgd.rank_search import Count, Tally, search

__all__ = ["order_statistics"]

SAMPLE = 2048
SORTED_ELEMENTS = 640  # up to 24 particles: their pairs are sorted sooner than counted


def order_statistics(particles: jax.Array, ranks: tuple[int, ...]) -> jax.Array:
    """The squared distances |x_i - x_j|^2, i < j, of the given ranks.

    Args:
      particles: (N, d) float32 or float64, N >= 2.
      ranks: R static integers in [1, N (N - 1) / 2]; rank 1 is the smallest distance.

    Returns:
      (R,) squared distances in the dtype of the particles; NaN where a coordinate is not finite.
      Differentiable, forward and reverse, any order. Ties count as their mean.
    """
    fixed = lax.stop_gradient(particles)
    values, keys, blocks = _select(fixed, ranks)
    return _with_derivative(values, prepare(fixed), keys, blocks, particles)


@jax.custom_jvp
def _with_derivative(values, pairs: BlockKeys, keys, blocks, particles) -> jax.Array:
    """The values, as a differentiable function of the particles."""
    return values


@_with_derivative.defjvp
def _with_derivative_jvp(primals, tangents):
    *_, pairs, keys, blocks, particles = primals
    # Which pairs tie is locally constant, so for another derivative the gradients are a function
    # of the particles, as are the values.
    gradients = _tied_gradients(pairs, keys, blocks, particles)
    return _with_derivative(*primals), jnp.sum(gradients * tangents[-1], axis=(1, 2))


@functools.partial(jax.jit, static_argnums=1)  # so that a call outside of jit gives the same bits
def _select(particles, ranks) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Values (R,), their keys (R,), and the blocks they come from where those are stored."""
    n = particles.shape[0]
    pairs = prepare(particles)
    steps = pairs.layout.steps
    sample = _sample_keys(pairs)

    def attempt(state):
        direct, _, _, _ = state
        blocks = pairs.blocks(direct)
        block = pairs.keys if blocks is None else blocks.__getitem__
        if blocks is not None and pairs.layout.elements <= SORTED_ELEMENTS:
            keys = jnp.sort(blocks.reshape(-1))[np.array(ranks) - 1]
        else:
            one_pass = functools.partial(tally_pairs, block, steps)
            keys = search(one_pass, ranks, n * (n - 1) // 2, sample)
        again = ~direct & pairs.too_coarse(from_key(keys[0]))
        return direct | again, again, keys, blocks

    # At most two rounds: the second, by differences, only where the expansion of |x - y|^2
    # has lost too many digits at the distance that was asked for.
    shapes = jax.eval_shape(attempt, (pairs.direct, None, None, None))
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    start = (pairs.direct, jnp.ones((), bool), *zeros[2:])
    _, _, keys, blocks = lax.while_loop(lambda state: state[1], attempt, start)
    values = from_key(keys) * pairs.power * pairs.power
    return jnp.where(pairs.finite, values, jnp.nan), keys, blocks


def _sample_keys(pairs: BlockKeys) -> jax.Array:
    """Sorted keys of a fixed pseudorandom sample of pairs (the same at every call)."""
    n = pairs.layout.particles
    size = min(SAMPLE, max(64, n * (n - 1) // 32))
    generator = np.random.default_rng(0)
    i = generator.integers(0, n, size)
    j = (i + generator.integers(1, n, size)) % n
    x = pairs.scaled
    return jnp.sort(to_key(jnp.sum((x[:, i] - x[:, j]) ** 2, axis=0)))


def _tied_gradients(pairs: BlockKeys, keys, blocks, v) -> jax.Array:
    """For each key, the mean over the pairs with that key of 2 (e_i - e_j) (v_i - v_j): (R, N, d).

    At v = particles it is the gradient of the key's squared distance. Linear in v, and
    differentiable in v alone: which pairs tie is locally constant.
    """
    layout = pairs.layout
    wrapped = layout.wrap(v - middle(v))

    @jax.checkpoint  # else reverse mode would keep the mask of every pair
    def block(step, wrapped):
        row, column = layout.starts(step)
        found = pairs.keys(step) if blocks is None else blocks[step]
        tied = [found == key for key in keys]
        degrees = _row_counts(tied)  # (R, rows)
        d = wrapped.shape[1]
        rows = lax.dynamic_slice(wrapped, (row, 0), (layout.rows, d))
        columns = lax.dynamic_slice(wrapped, (column, 0), (layout.columns, d))

        def differences(rows, columns):
            a = jnp.stack(tied).astype(rows.dtype)
            dot = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
            to_rows = a.sum(2)[:, :, None] * rows - dot("rij,jd->rid", a, columns)
            to_columns = a.sum(1)[:, :, None] * columns - dot("rij,id->rjd", a, rows)
            return to_rows, to_columns

        def nothing(rows, columns):
            return (
                jnp.zeros((len(tied), *rows.shape), rows.dtype),
                jnp.zeros((len(tied), *columns.shape), columns.dtype),
            )

        # Nearly every block has no tied pair at all.
        parts = lax.cond(jnp.any(degrees > 0), differences, nothing, rows, columns)
        return *parts, jnp.sum(degrees, axis=1)

    def add(carry, step):
        total, ties = carry
        to_rows, to_columns, count = block(step, wrapped)
        row, column = layout.starts(step)
        for start, part in ((row, to_rows), (column, to_columns)):
            old = lax.dynamic_slice(total, (0, start, 0), part.shape)
            total = lax.dynamic_update_slice(total, old + part, (0, start, 0))
        return (total, ties + count.astype(ties.dtype)), None

    zeros = jnp.zeros((len(keys), *wrapped.shape), wrapped.dtype)
    ties = jnp.zeros((len(keys),), wrapped.dtype)
    total, ties = lax.scan(add, (zeros, ties), jnp.arange(layout.steps))[0]
    overlap = layout.wrapped - layout.padded
    total = total[:, : layout.padded].at[:, :overlap].add(total[:, layout.padded :])
    # No tie at all would mean that a block came out differently here: NaN, not a silent zero.
    scale = jnp.where(ties > 0, 2 / jnp.maximum(ties, 1), jnp.nan)
    return total[:, : layout.particles] * scale[:, None, None]


def _row_counts(conditions: list[jax.Array]) -> jax.Array:
    """How many hold in each row of each (rows, columns) block: (R, rows), in one read."""
    zeros = [jnp.int32(0)] * len(conditions)
    ones = [condition.astype(jnp.int32) for condition in conditions]
    return jnp.stack(
        lax.reduce(ones, zeros, lambda x, y: [a + b for a, b in zip(x, y, strict=True)], (1,))
    )


def tally_block(keys: jax.Array, thresholds, low, high) -> tuple[jax.Array, ...]:
    """Counts (K,), smallest (R,) and largest (R,) of one block, in a single read of it.

    One reduction with many outputs: XLA on the CPU would read the block once for each of
    several reductions, at ten times the time.
    """
    masked = masked_key(from_key(keys).dtype)
    counts = [(keys <= t).astype(jnp.int32) for t in thresholds]
    smallest = [jnp.where(keys > l, keys, masked) for l in low]
    largest = [jnp.where(keys <= h, keys, -1) for h in high]
    k, r = len(counts), len(smallest)
    zero, minus_one = jnp.int32(0), jnp.asarray(-1, keys.dtype)
    initial = [zero] * k + [jnp.asarray(masked, keys.dtype)] * r + [minus_one] * r
    operators = [lax.add] * k + [lax.min] * r + [lax.max] * r

    def combine(xs, ys):
        return [operator(x, y) for operator, x, y in zip(operators, xs, ys, strict=True)]

    axis = keys.ndim - 1
    rows = lax.reduce(counts + smallest + largest, initial, combine, (axis,))
    whole = lax.reduce(rows, initial, combine, tuple(range(axis)))
    return jnp.stack(whole[:k]), jnp.stack(whole[k : k + r]), jnp.stack(whole[k + r :])


def tally_pairs(block: Callable, steps: int, thresholds, low, high) -> Tally:
    """A pass: ``tally_block`` over ``block(0), ..., block(steps - 1)``."""

    def add(tally: Tally, step):
        counts, smallest, largest = tally_block(block(step), thresholds, low, high)
        return Tally(
            tally.counts.add(counts),
            jnp.minimum(tally.smallest, smallest),
            jnp.maximum(tally.largest, largest),
        ), None

    zeros = jnp.zeros(thresholds.shape, jnp.int32)
    masked = masked_key(from_key(low).dtype)
    start = Tally(Count(zeros, zeros), jnp.full_like(low, masked), jnp.full_like(low, -1))
    return lax.scan(add, start, jnp.arange(steps))[0]
