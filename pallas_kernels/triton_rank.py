"""Order statistics of the squared distances of all pairs of particles: exact, streamed, never
waiting for the host.

A fixed number of launches, each a pass over the tiles of `triton_rank_tiles`: it counts the
distances at or below each of W thresholds, and finds the smallest and the largest inside the
bracket. Every program of a launch first reads what the launch before counted, tightens the bracket
(`triton_rank_bracket`) and makes the next thresholds, the same in every program; once the bracket
is closed, the launches that remain return at once.

Distances are compared as floats and counted exactly, in whole numbers that float32 holds (Pallas
has no atomic addition of vectors of integers), which add up in any order: the answer, one of the
computed distances, is the same in every call.

Many particles begin with two passes over the tiles nearest to the diagonal, a sample in which every particle
has the same part. It only places the first thresholds. Where the first pass over everything shows
the wanted distance to be small beside the particles' reach, the search begins again by differences.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_pairs as pairs
from pallas_kernels import triton_rank_tiles as rank_tiles
from pallas_kernels import triton_tiles as tiles
from pallas_kernels.triton_rank_bracket import (
    LIMB,
    NONE,
    Bracket,
    first_thresholds,
    from_u,
    passes,
    to_u,
)
from pallas_kernels.triton_rank_tiles import (
    COARSE,
    FAR,
    INFINITE,
    Distances,
    Layout,
    Operands,
    is_pair_of_blocks,
    number,
    power,
    scale_field,
)

MAX_DIMENSION = 512
MAX_PARTICLES = 1 << 20
FIELDS = 8  # of a bracket, and of what all brackets share: powers of two
LAUNCH, DIRECT, FIELD, FINITE, COARSE_U = range(5)
DIGITS = 12  # bits of a count in each of its counters
COPIES = 4  # counters that programs add to, so that they seldom meet


@dataclasses.dataclass(frozen=True)
class Search:
    """Static choices. thresholds: W, of each rank and pass; sample: offsets of the sampled tiles,
    or 0; splits: programs that share the offsets of a block."""

    layout: Layout
    thresholds: int
    sample: int
    splits: int
    ends: bool = True  # whether passes also find the bracket's smallest and largest distance
    stages: int = 2

    @property
    def passes(self):
        return passes(self.thresholds)

    @property
    def limbs(self):
        """Float32 counters a count is cut into: no sum in one of them passes 2^24."""
        return 1 if self.total < 1 << 24 else 2 if self.total < 1 << (24 + DIGITS) else 3

    @property
    def two_limbs(self):
        return self.total >= 1 << 31

    @property
    def total(self):
        return self.layout.n * (self.layout.n - 1) // 2

    @property
    def sampled(self):
        return self.layout.pairs_within(self.sample)


class Found(NamedTuple):
    """What `order_statistics` returns: the values, and how to meet their pairs again."""

    values: jax.Array  # (R,) float32, NaN where a coordinate is not finite
    keys: jax.Array  # (R,) int32, u of `triton_rank_bracket`
    common: jax.Array  # (FIELDS,) int32
    operands: Operands


def supports(n, d, dtype):
    """Whether `order_statistics` covers a case: (bool, reason)."""
    if jnp.dtype(dtype) != jnp.float32:
        return False, f"the portable Pallas kernels compute in float32, got {jnp.dtype(dtype).name}"
    if not 2 <= n <= MAX_PARTICLES:
        return False, f"n must lie in [2, {MAX_PARTICLES}], got {n}"
    if not 1 <= d <= MAX_DIMENSION:
        return False, f"d must lie in [1, {MAX_DIMENSION}], got {d}"
    return True, ""


def plan(n, d, interpret=False):
    """The static choices for n particles in d dimensions.

    Few particles: a launch costs more than its compares, and one warp adds up without waiting for
    others. Many: as many programs as run at once, since each makes the thresholds anew.
    """
    if n <= 2048:
        size, warps, thresholds, sample, programs, ends = 32, 1, 32, 0, 5, True
    elif n <= 8192:
        size, warps, thresholds, sample, programs, ends = 64, 4, 16, 4, 2, True
    else:
        size, warps, thresholds, sample, programs, ends = 128, 8, 16, 2, 1, False
    if interpret:  # which compiles every compare anew
        thresholds = 8
    layout = Layout(n, d, size, warps, interpret)
    splits = programs * tiles.MULTIPROCESSORS // layout.blocks
    return Search(layout, thresholds, sample, min(layout.offsets, max(1, splits)), ends)


def order_statistics(x, ranks, *, interpret=False, search=None):
    """Squared distances |x_i - x_j|^2, i < j, of the given ranks.

    Args:
      x: (N, d) float32. ranks: R static integers in [1, N (N - 1) / 2]; rank 1 is the smallest distance.
      interpret: run under the Pallas interpreter. search: a `Search`, for tests and tuning.

    Returns:
      `Found`.
    """
    search = search or plan(*x.shape, interpret)
    kinds = [("start", False)] + [("next", False)] * (search.passes - 1)
    if search.sample:
        kinds = [("start", True), ("next", True), ("turn", False), *kinds[1:]]
    operands, tally = rank_tiles.prepare(x, search.layout, cleared=_tally(search, len(ranks)))
    state, counted = [], []
    for kind, sampled in kinds:
        out = _pass(search, ranks, kind, sampled, operands, state + counted, tally)
        state, counted, tally = out[:3], out[3:5], out[5:]
    values, keys = _finish(search, ranks, state + counted)
    return Found(values, keys, state[0], operands)


def _tally(search, r):
    """Counts of each copy, rank, part and threshold, and ends of each copy and rank, of one pass."""
    copies = COPIES if search.layout.blocks >= 8 else 1
    return [
        jax.ShapeDtypeStruct((copies, r, search.limbs, search.thresholds), jnp.float32),
        jax.ShapeDtypeStruct((copies, 2 * r), jnp.int32),
    ]


# --- one launch --------------------------------------------------------------------------------------


def _pass(search, ranks, kind, sampled, operands, before, tally):
    """[common, brackets, thresholds, counts, ends, zeros, zeros] of a pass over all tiles, or the
    sampled ones.

    Args:
      kind: "start" makes the first thresholds; "next" tightens the bracket first; "turn" goes from
        the bracket in the sample to thresholds for all pairs.
      before: the first five of the pass before, [] for "start". tally: zeros to count in.
    """
    layout, r, w = search.layout, len(ranks), search.thresholds
    arrays = [a for a in operands if a is not None]
    offsets = min(search.sample, layout.offsets) if sampled else layout.offsets
    splits = min(search.splits, offsets)

    def program(*refs):
        operand_refs, refs = refs[: len(arrays)], refs[len(arrays) :]
        before_refs, refs = refs[: len(before)], refs[len(before) + 2 :]
        state_out, (counts_ref, ends_ref), cleared = refs[:3], refs[3:5], refs[5:]
        i, split = pl.program_id(0), pl.program_id(1)
        writes = (i == 0) & (split == 0)

        def count(common, brackets, cuts, direct):
            distances = Distances(layout, operand_refs, common[FIELD], direct)
            walk = (i, split, splits, offsets)
            # A bracket of everything has no use for its ends.
            with_ends = search.ends and kind != "start"
            counts, ends = _count(distances, walk, brackets, cuts, with_ends)
            copy = (i + split) % counts_ref.shape[0]
            for q in range(r):
                part = _vector(counts[q * w : (q + 1) * w])
                for limb in range(search.limbs):
                    value, rest = part, part
                    if limb < search.limbs - 1:
                        value, rest = part & ((1 << DIGITS) - 1), part >> DIGITS
                    at = (copy, 0 * i + q, 0 * i + limb, pl.ds(0, w))
                    plt.atomic_add(counts_ref, at, value.astype(jnp.float32))
                    part = rest
            for k, end in enumerate(ends):

                @pl.when(end > 0)  # most programs have nothing inside a narrow bracket
                def _(k=k, end=end):
                    plt.atomic_max(ends_ref, (copy, 0 * i + k), end)

        def work(common, brackets, thresholds):
            _store(state_out, writes, common, brackets, thresholds)

            @pl.when(_any_open(brackets))
            def _():
                # One by one: a vector's elements are for threads, these for all of them.
                places = jnp.arange(w)
                cuts = [
                    _cut(jnp.max(jnp.where(places == k, values, 0)))
                    for values in thresholds
                    for k in range(w)
                ]
                if layout.direct:
                    count(common, brackets, cuts, True)
                    return
                pl.when(common[DIRECT] > 0)(lambda: count(common, brackets, cuts, True))
                pl.when(common[DIRECT] == 0)(lambda: count(common, brackets, cuts, False))

        @pl.when(writes)
        def _():
            for ref in cleared:
                for index in np.ndindex(*ref.shape[:-1]):
                    at = tuple(0 * i + k for k in index)
                    ref[(*at, pl.ds(0, ref.shape[-1]))] = jnp.zeros(ref.shape[-1:], ref.dtype)

        if kind == "start":
            work(*_begin(search, ranks, sampled, operand_refs, 0 * i))
            return
        # All loads first, so that they are under way together.
        common, brackets = _load(search, before_refs, r)
        counted = _counted(search, before_refs, r)
        going = common[FINITE] > 0 if kind == "turn" else _any_open(brackets)

        @pl.when(going)
        def _():
            work(*_step(search, ranks, kind, sampled, common, brackets, counted))

        @pl.when(~going)
        def _():
            _store(state_out, writes, common, brackets, ())

    shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in [(FIELDS,), (r, FIELDS), (r, w)]]
    name = program.__name__ = f"svgd_rank_{kind}" + ("_sample" if sampled else "")
    first = len(arrays) + len(before)
    return pl.pallas_call(
        program,
        grid=(layout.blocks, splits),
        in_specs=[pl.BlockSpec()] * (first + 2),
        out_specs=[pl.BlockSpec()] * 7,
        out_shape=shapes + _tally(search, r) * 2,
        input_output_aliases={first: 3, first + 1: 4},
        compiler_params=plt.CompilerParams(num_warps=layout.warps, num_stages=search.stages),
        interpret=layout.interpret,
        name=name,
    )(*arrays, *before, *tally)


def _finish(search, ranks, before):
    """Values and keys, in one program."""
    r = len(ranks)

    def program(*refs):
        before_refs, (values_ref, keys_ref) = refs[:5], refs[5:]
        common, brackets = _load(search, before_refs, r)
        tightened = _tightened(search, ranks, False, brackets, _counted(search, before_refs, r))
        unit = power(254 - common[FIELD])  # the reciprocal of the scale
        for q, bracket in enumerate(tightened):
            keys_ref[q] = bracket.high
            value = from_u(bracket.high) * unit * unit
            values_ref[q] = jnp.where(common[FINITE] > 0, value, jnp.nan)

    name = program.__name__ = "svgd_rank_finish"
    return pl.pallas_call(
        program,
        grid=(1,),
        in_specs=[pl.BlockSpec()] * 5,
        out_specs=[pl.BlockSpec()] * 2,
        out_shape=[jax.ShapeDtypeStruct((r,), jnp.float32), jax.ShapeDtypeStruct((r,), jnp.int32)],
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=search.layout.interpret,
        name=name,
    )(*before)


# --- what every program does first ------------------------------------------------------------------


def _begin(search, ranks, sampled, operand_refs, zero):
    """common, brackets and thresholds from what `prepare` found."""
    layout, w = search.layout, search.thresholds
    _, extents_ref, moments_ref = operand_refs[:3]
    padded = tiles.next_power_of_two(layout.blocks)
    every = pl.ds(zero, padded)
    inside = zero + jnp.arange(padded) < layout.blocks
    extents = plt.load(extents_ref.at[every], mask=inside, other=0)
    sums, squares, norms = (
        plt.load(moments_ref.at[zero + k, every], mask=inside, other=0.0) for k in range(3)
    )
    extent = jnp.max(extents)
    field = scale_field(extent)
    factor = power(127 + field - scale_field(extents))
    factor = factor * factor
    count = layout.pairs_within(1)
    mean = jnp.sum(sums * factor) * (1.0 / count)
    variance = jnp.sum(squares * factor * factor) * (1.0 / count) - mean * mean
    finite = extent < INFINITE
    coarse = to_u(COARSE * jnp.max(norms * factor))
    common = [zero, zero, field, finite.astype(jnp.int32), coarse]
    brackets, thresholds = [], []
    for rank in ranks:
        total = search.sampled if sampled else search.total
        whole = Bracket.whole(search.two_limbs, total, zero)
        whole.high = jnp.where(finite, whole.high, 0)  # closed
        brackets.append(whole)
        found = first_thresholds((rank - 0.5) / search.total, w, mean, variance)
        if not sampled and not layout.direct:
            found = jnp.where(jnp.arange(w) == 0, coarse, found)
        thresholds.append(found)
    return common, brackets, thresholds


def _step(search, ranks, kind, sampled, common, brackets, counted):
    """common, brackets and thresholds after the launch before this one."""
    layout, w = search.layout, search.thresholds
    over_sample = sampled or kind == "turn"
    brackets = _tightened(search, ranks, over_sample, brackets, counted)
    launch, direct, field, finite, coarse = common
    whole = Bracket.whole(search.two_limbs, search.total, 0 * launch)
    if not (over_sample or layout.direct):
        small = brackets[0].high <= coarse
        for bracket in brackets[1:]:
            small |= bracket.high <= coarse
        again = small & (direct == 0)
        direct = jnp.where(again, 1, direct)
        brackets = [whole.where(again, bracket) for bracket in brackets]
    full_passes_left = search.passes - (launch + 2) + (2 if search.sample else 0)
    thresholds = []
    for rank, bracket in zip(ranks, brackets, strict=True):
        if kind == "turn":
            found = bracket.thresholds(_sample_rank(search, rank), w, 30, search.sampled)
            if not layout.direct:
                found = jnp.where(jnp.arange(w) == 0, coarse, found)
        elif sampled:
            found = bracket.thresholds(_sample_rank(search, rank), w, 30)
        else:
            found = bracket.thresholds(rank, w, full_passes_left)
        thresholds.append(found)
    if kind == "turn":
        brackets = [whole] * len(ranks)
    return [launch + 1, direct, field, finite, coarse], brackets, thresholds


def _sample_rank(search, rank):
    return min(max(1, round(rank * search.sampled / search.total)), search.sampled)


def _counted(search, before_refs, r):
    """(thresholds, counts, ends) of each rank in the launch before this one, as `Bracket.tighten`
    takes them."""
    thresholds_ref, counts_ref, ends_ref = before_refs[2:]
    every = pl.ds(0, search.thresholds)
    copies = range(counts_ref.shape[0])
    found = []
    for q in range(r):
        # Copy by copy: a sum over an axis would have to cross threads.
        parts = [
            sum(counts_ref[c, q, limb, every].astype(jnp.int32) for c in copies)
            for limb in range(search.limbs)
        ]
        if search.two_limbs:
            low, high = parts[0] & ((1 << DIGITS) - 1), (parts[0] >> DIGITS) + parts[1]
            shift = LIMB - DIGITS
            counts = high >> shift, low | ((high & ((1 << shift) - 1)) << DIGITS)
            if search.limbs > 2:
                counts = counts[0] + (parts[2] << (DIGITS - shift)), counts[1]
        else:
            counts = None, sum(part << (DIGITS * k) for k, part in enumerate(parts))
        ends = None
        if search.ends:
            largest, smallest = (
                functools.reduce(jnp.maximum, [ends_ref[c, 2 * q + side] for c in copies])
                for side in (0, 1)
            )
            ends = largest > 0, NONE - smallest, largest - 1
        found.append((thresholds_ref[q, every], counts, ends))
    return found


def _tightened(search, ranks, over_sample, brackets, counted):
    return [
        bracket.tighten(_sample_rank(search, rank) if over_sample else rank, *seen)
        for rank, bracket, seen in zip(ranks, brackets, counted, strict=True)
    ]


def _any_open(brackets):
    found = brackets[0].open()
    for bracket in brackets[1:]:
        found |= bracket.open()
    return found


def _load(search, before_refs, r):
    common_ref, brackets_ref = before_refs[:2]
    common = [common_ref[k] for k in range(COARSE_U + 1)]
    fields = range(len(Bracket.FIELDS))
    return common, [
        Bracket(search.two_limbs, *(brackets_ref[q, k] for k in fields)) for q in range(r)
    ]


def _store(state_refs, writes, common, brackets, thresholds):
    """By one program: all have the same. Thresholds that nobody will count are left out."""

    @pl.when(writes)
    def _():
        common_ref, brackets_ref, thresholds_ref = state_refs
        for k, value in enumerate(common):
            common_ref[k] = value
        for q, bracket in enumerate(brackets):
            for k, value in enumerate(bracket.values()):
                brackets_ref[q, k] = value
        for q, values in enumerate(thresholds):
            thresholds_ref[q, pl.ds(0, values.shape[0])] = values


# --- the pass over the tiles ------------------------------------------------------------------------


def _count(distances, walk, brackets, cuts, with_ends):
    """(counts, one a cut; [] or the ends, largest + 1 and NONE - smallest inside each bracket)."""
    layout = distances.layout
    i, split, splits, offsets = walk
    size, turns = layout.size, -(-offsets // splits)
    # The axis along which a thread holds most of its elements: sums along it cross few threads.
    axis = 0 if distances.direct else 1
    left = distances.block(i)
    lowest, beyond = [], []
    if with_ends:
        lowest = [jnp.where(b.low < 0, -FAR, from_u(b.low + 1)) for b in brackets]
        beyond = [from_u(b.high + 1) for b in brackets]

    def turn(t, carry):
        counts, largest, smallest = carry
        offset = split + t * splits
        visited = (offset < offsets) & is_pair_of_blocks(layout, i, offset)
        rows, inside, far, *rest = distances.block((i + offset) % layout.blocks)
        right = (rows, inside, jnp.where(visited, far, FAR), *rest)
        distance = distances.tile(left, right, offset)
        counts = [
            count + jnp.sum(_below(distance, cut, layout.interpret), axis=axis)
            for count, cut in zip(counts, cuts, strict=True)
        ]
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

    carry = (
        [rows_of(0.0) for _ in cuts],
        [rows_of(-FAR) for _ in beyond],
        [rows_of(FAR) for _ in lowest],
    )
    carry = turn(0 * i, carry) if turns == 1 else lax.fori_loop(0, turns, turn, carry)
    counts, largest, smallest = carry
    ends = []
    for top, bottom in zip(largest, smallest, strict=True):
        top, bottom = jnp.max(top), jnp.min(bottom)
        ends += [jnp.where(top == -FAR, 0, to_u(top) + 1), NONE - to_u(bottom)]
    counts = [count.astype(jnp.int32) for count in counts]
    if turns * size * size >= 1 << 15:
        return [jnp.sum(count) for count in counts], ends
    # Two in one sum: sums over all threads are what remains to do for few tiles.
    totals = []
    for one, other in zip(counts[::2], counts[1::2], strict=True):
        total = jnp.sum(one | (other << 16))
        totals += [total & 0xFFFF, total >> 16]
    return totals, ends


def _vector(scalars):
    places = jnp.arange(len(scalars))
    found = jnp.zeros((len(scalars),), jnp.int32)
    for k, value in enumerate(scalars):
        found = jnp.where(places == k, value, found)
    return found


def _cut(u):
    """(bound, bound 2^a, -2^a) where distance < bound just when its integer is <= u, and 2^a units
    fill a step."""
    bound = from_u(u + 1)
    pattern = rank_tiles.bits(bound)
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
