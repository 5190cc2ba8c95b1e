"""One program's part of a pass: how many distances of its tiles lie at or below each threshold."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import triton_pairs as pairs
from pallas_kernels.triton_rank_bracket import NONE, from_u, to_u
from pallas_kernels.triton_rank_tiles import FAR, bits, number, walk_tiles

ONE_BY_ONE, AT_ONCE, BY_VALUE = range(3)
MANY_VALUES = 32  # in one tile, beyond which thresholds take no longer
UNROLL = 4  # pairs of thresholds under way together: one takes long, but leaves the units idle


def count_below(distances, walk, brackets, thresholds, with_ends, how):
    """Counts, an int32 vector a rank, and ends: [], or largest + 1 and NONE - smallest of each bracket.

    Args:
      distances, walk: as in `walk_tiles`.
      thresholds: (W,) int32 a rank. how: a tile is counted, ONE_BY_ONE, AT_ONCE or BY_VALUE, which
        leaves out what lies below the brackets.
    """
    layout = distances.layout
    _, _, splits, offsets = walk
    size, turns = layout.size, -(-offsets // splits)
    # The axis along which a thread holds most of its elements: sums along it cross few threads.
    axis = 0 if distances.direct else 1
    if how == ONE_BY_ONE:
        counter = _OneByOne(layout, axis, thresholds)
    elif how == AT_ONCE:
        counter = _AllAtOnce(layout, axis, thresholds, turns)
    else:
        counter = _ByValue(layout, axis, brackets, thresholds)
    lowest, beyond = _edges(brackets) if with_ends else ([], [])

    def visit(distance, carry):
        counts, largest, smallest = carry
        counts = counter.add(distance, counts)
        largest = [
            jnp.maximum(found, jnp.max(jnp.where(distance < high, distance, -FAR), axis=axis))
            for found, high in zip(largest, beyond, strict=True)
        ]
        smallest = [
            jnp.minimum(found, jnp.min(jnp.where(distance >= low, distance, FAR), axis=axis))
            for found, low in zip(smallest, lowest, strict=True)
        ]
        return counts, largest, smallest

    def rows_of(value):
        return jnp.full((size,), value, jnp.float32)

    carry = counter.zeros(), [rows_of(-FAR) for _ in beyond], [rows_of(FAR) for _ in lowest]
    counts, largest, smallest = walk_tiles(distances, walk, visit, carry)
    ends = []
    for top, bottom in zip(largest, smallest, strict=True):
        top, bottom = jnp.max(top), jnp.min(bottom)
        ends += [jnp.where(top == -FAR, 0, to_u(top) + 1), NONE - to_u(bottom)]
    return counter.totals(counts), ends


def _edges(brackets):
    """Distances from which on, and up to which, one lies inside each bracket."""
    lowest = [jnp.where(b.low < 0, -FAR, from_u(b.low + 1)) for b in brackets]
    return lowest, [from_u(b.high + 1) for b in brackets]


class _OneByOne:
    """Counts a tile threshold by threshold, in a loop: few particles visit few tiles, and code that runs
    once takes longer to fetch than to run."""

    def __init__(self, layout, axis, thresholds, unroll=UNROLL):
        self.layout, self.axis, self.thresholds = layout, axis, thresholds
        self.places = jnp.arange(thresholds[0].shape[0])
        self.unroll = min(unroll, len(self.places) // 2)
        # Two thresholds share a sum: float32 holds that of a row, int32 that of a tile.
        self.base = 2 * layout.size**2
        assert self.base * layout.size < 1 << 24 and self.base * layout.size**2 < 1 << 31

    def zeros(self):
        return [jnp.zeros(self.places.shape, jnp.int32) for _ in self.thresholds]

    def add(self, distance, counts):
        def some(k, counts):
            added = []
            for values, found in zip(self.thresholds, counts, strict=True):
                for m in range(self.unroll):
                    pair = k * self.unroll + m
                    first, second = (
                        _below(
                            distance,
                            cut(_element(values, 2 * pair + one)),
                            self.layout.interpret,
                        )
                        for one in (0, 1)
                    )
                    base = jnp.full((1, 1), self.base, jnp.float32)
                    both = pairs.fma(second, base, first, self.layout.interpret)
                    total = jnp.sum(jnp.sum(both, axis=self.axis).astype(jnp.int32))
                    total = jnp.where(
                        self.places & 1 == 0,
                        total & (self.base - 1),
                        total >> (self.base.bit_length() - 1),
                    )
                    found += jnp.where(self.places >> 1 == pair, total, 0)
                added.append(found)
            return added

        return lax.fori_loop(0, len(self.places) // (2 * self.unroll), some, counts)

    def totals(self, counts):
        return counts


class _AllAtOnce:
    """Counts a tile for all thresholds, a row's counts in a row's threads until the last tile."""

    def __init__(self, layout, axis, thresholds, turns):
        self.layout, self.axis = layout, axis
        self.count = thresholds[0].shape[0]
        self.few = turns * layout.size**2 < 1 << 15
        # A vector's elements are for threads, these for all of them.
        self.cuts = [cut(_element(v, k)) for v in thresholds for k in range(self.count)]

    def zeros(self):
        return [jnp.zeros((self.layout.size,), jnp.float32) for _ in self.cuts]

    def add(self, distance, counts):
        return [
            count + jnp.sum(_below(distance, cut, self.layout.interpret), axis=self.axis)
            for count, cut in zip(counts, self.cuts, strict=True)
        ]

    def totals(self, counts):
        counts = [count.astype(jnp.int32) for count in counts]
        if self.few:
            # Two in one sum: sums over all threads are what remains to do for few tiles.
            totals = []
            for one, other in zip(counts[::2], counts[1::2], strict=True):
                total = jnp.sum(one | (other << 16))
                totals += [total & 0xFFFF, total >> 16]
        else:
            totals = [jnp.sum(count) for count in counts]
        return [_vector(totals[q : q + self.count]) for q in range(0, len(totals), self.count)]


class _ByValue:
    """Counts what lies inside the brackets, value by value: inside narrow ones most tiles have nothing.
    Where particles come in order of their clusters one tile may have much: it is counted by threshold.
    """

    def __init__(self, layout, axis, brackets, thresholds):
        self.axis, self.thresholds = axis, thresholds
        self.edges = _edges(brackets)
        self.by_threshold = _OneByOne(layout, axis, thresholds, unroll=1)

    def zeros(self):
        return self.by_threshold.zeros()

    def add(self, distance, counts):
        def number_of(condition):
            return jnp.sum(jnp.sum(jnp.where(condition, 1.0, 0.0), axis=self.axis)).astype(
                jnp.int32
            )

        def least(condition):
            return jnp.min(jnp.min(jnp.where(condition, distance, FAR), axis=self.axis))

        def by_value(counts):
            added = []
            for values, low, high, found in zip(self.thresholds, *self.edges, counts, strict=True):

                def take(state, values=values):
                    value, found = state
                    ties = number_of(distance == value)
                    return least(distance > value), found + jnp.where(
                        values >= to_u(value), ties, 0
                    )

                first = least(distance >= low), found
                inside = lambda state, high=high: state[0] < high
                added.append(lax.while_loop(inside, take, first)[1])
            return added

        def by_threshold(counts):
            below = [number_of(distance < low) for low in self.edges[0]]
            counts = [found - less for found, less in zip(counts, below, strict=True)]
            return self.by_threshold.add(distance, counts)

        inside = sum(
            number_of((low <= distance) & (distance < high))
            for low, high in zip(*self.edges, strict=True)
        )
        return lax.cond(inside > MANY_VALUES, by_threshold, by_value, counts)

    def totals(self, counts):
        return counts


def _element(values, k):
    """Element k of a vector of integers that are not negative, as a scalar."""
    return jnp.max(jnp.where(jnp.arange(values.shape[0]) == k, values, 0))


def _vector(scalars):
    places = jnp.arange(len(scalars))
    found = jnp.zeros((len(scalars),), jnp.int32)
    for k, value in enumerate(scalars):
        found = jnp.where(places == k, value, found)
    return found


def cut(u):
    """(bound, bound 2^a, -2^a) where distance < bound just when its integer is <= u, and 2^a units
    fill a step."""
    bound = from_u(u + 1)
    pattern = bits(bound)
    return (
        bound,
        number((pattern & 0x7FFFFF) | (151 << 23)),
        -number((278 - (pattern >> 23)) << 23),
    )


def _below(distance, cut, interpret):
    """1.0 where the distance is below the bound, else 0.0.

    (bound - distance) 2^a is 1 or more for every float below the bound, so saturated to [0, 1] it
    is the answer: one instruction of the multiply-add units, where a comparison takes two of units
    half as many.
    """
    bound, scaled, factor = cut
    if interpret:
        return jnp.where(distance < bound, 1.0, 0.0)
    arguments = jnp.broadcast_arrays(distance, factor, scaled)
    return pairs._instruction("fma.rn.sat.f32", *arguments)
