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
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_rank_tiles as rank_tiles
from pallas_kernels import triton_tiles as tiles
from pallas_kernels.triton_rank_bracket import from_u, passes
from pallas_kernels.triton_rank_count import AT_ONCE, BY_VALUE, ONE_BY_ONE, count_below
from pallas_kernels.triton_rank_state import (
    DIGITS,
    DIRECT,
    FIELD,
    FIELDS,
    FINITE,
    any_open,
    begin,
    counted,
    few_inside,
    limbs_of,
    load,
    step,
    store,
    tightened,
)
from pallas_kernels.triton_rank_tiles import Distances, Layout, Operands, is_pair_of_blocks, power

MAX_DIMENSION = 512
MAX_PARTICLES = 1 << 20
COPIES = 4  # counters that programs add to, so that they seldom meet


@dataclasses.dataclass(frozen=True)
class Search:
    """Static choices. thresholds: W, of each rank and pass; sample: offsets of the sampled tiles,
    or 0; splits: programs that share the offsets of a block."""

    layout: Layout
    thresholds: int
    sample: int
    splits: int
    ends: int = (
        1  # pass over everything, from 0, from which on one also finds the ends of a bracket
    )
    one_by_one: bool = False  # how a tile is counted: see triton_rank_count
    few: int = 0  # where no more distances lie inside the brackets, tiles are counted by value
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

    Few particles: a launch and its code cost more than its compares. Many: as many programs as run at
    once, since each makes the thresholds anew.
    """
    if n <= 1024:
        size, warps, thresholds, sample, programs, ends = 32, 1, 32, 0, 5, 1
    elif n <= 2048:
        size, warps, thresholds, sample, programs, ends = 64, 4, 16, 0, 2, 1
    elif n <= 8192:
        size, warps, thresholds, sample, programs, ends = 64, 4, 16, 4, 2, 1
    else:
        size, warps, thresholds, sample, programs, ends = 128, 8, 16, 2, 1, 2
    if interpret:  # which compiles every compare, and every branch, anew
        thresholds = 8
    layout = Layout(n, d, size, warps, interpret)
    splits = min(layout.offsets, max(1, programs * tiles.MULTIPROCESSORS // layout.blocks))
    few = 0 if interpret or n <= 1024 else 2 * layout.blocks * layout.offsets
    return Search(layout, thresholds, sample, splits, ends, n <= 1024, few)


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
    ranks = tuple(ranks)
    operands, tally = rank_tiles.prepare(x, search.layout, cleared=_tally(search, len(ranks)))
    arrays = [a for a in operands if a is not None]
    state, totals = [], []
    first = len(kinds) - search.passes
    for place, (kind, sampled) in enumerate(kinds):
        with_ends = place >= first + search.ends
        out = _pass(search, ranks, kind, sampled, with_ends)(*arrays, *state, *totals, *tally)
        state, totals, tally = out[:3], out[3:5], out[5:]
    values, keys = _finish(search, ranks, state + totals)
    return Found(values, keys, state[0], operands)


def _tally(search, r):
    """Counts of each copy, rank, part and threshold, and ends of each copy and rank, of one pass."""
    copies = COPIES if search.layout.blocks >= 8 else 1
    return [
        jax.ShapeDtypeStruct((copies, r, search.limbs, search.thresholds), jnp.float32),
        jax.ShapeDtypeStruct((copies, 2 * r), jnp.int32),
    ]


# --- one launch --------------------------------------------------------------------------------------


@functools.cache  # JAX then traces and lowers equal passes once
def _pass(search, ranks, kind, sampled, with_ends):
    """A pass over all tiles, or the sampled ones, as a function of arrays: operands, what the pass
    before returned first (nothing for "start"), zeros to count in.

    It returns [common, brackets, thresholds, counts, ends, zeros, zeros].

    Args:
      kind: "start" makes the first thresholds; "next" tightens the bracket first; "turn" goes from
        the bracket in the sample to thresholds for all pairs.
      with_ends: whether to find the smallest and the largest distance inside the bracket; in one of
        everything they are of no use.
    """
    layout, r, w = search.layout, len(ranks), search.thresholds
    operand_count, before_count = 3 if layout.direct else 5, 0 if kind == "start" else 5
    offsets = min(search.sample, layout.offsets) if sampled else layout.offsets
    splits = min(search.splits, offsets)

    def program(*refs):
        operand_refs, refs = refs[:operand_count], refs[operand_count:]
        before_refs, refs = refs[:before_count], refs[before_count + 2 :]
        state_out, (counts_ref, ends_ref), cleared = refs[:3], refs[3:5], refs[5:]
        i, split = pl.program_id(0), pl.program_id(1)
        writes = (i == 0) & (split == 0)

        def count(common, brackets, thresholds, direct, how):
            distances = Distances(layout, operand_refs, common[FIELD], direct)
            walk = (i, split, splits, offsets)
            counts, ends = count_below(distances, walk, brackets, thresholds, with_ends, how)
            copy = (i + split) % counts_ref.shape[0]
            for q, found in enumerate(counts):
                for limb, part in enumerate(limbs_of(search, found)):
                    at = (copy, 0 * i + q, 0 * i + limb, pl.ds(0 * i, w))
                    plt.atomic_add(counts_ref, at, part)
            for k, end in enumerate(ends):

                @pl.when(end > 0)  # most programs have nothing inside a narrow bracket
                def _(k=k, end=end):
                    plt.atomic_max(ends_ref, (copy, 0 * i + k), end)

        def work(common, brackets, thresholds):
            store(state_out, writes, common, brackets, thresholds)

            # With one tile each, the last offset of an even number leaves half of the programs none.
            going = any_open(brackets) & is_pair_of_blocks(layout, i, split)
            by_value = search.few > 0 and kind == "next" and not sampled
            few = few_inside(search, brackets) if by_value else False

            def either(going, direct):
                by_threshold = ONE_BY_ONE if search.one_by_one else AT_ONCE
                arguments = common, brackets, thresholds, direct
                if not by_value:
                    pl.when(going)(lambda: count(*arguments, by_threshold))
                else:
                    pl.when(going & ~few)(lambda: count(*arguments, by_threshold))
                    pl.when(going & few)(lambda: count(*arguments, BY_VALUE))

            if layout.direct:
                either(going, True)
            else:
                either(going & (common[DIRECT] > 0), True)
                either(going & (common[DIRECT] == 0), False)

        @pl.when(writes)
        def _():
            for ref in cleared:
                for index in np.ndindex(*ref.shape[:-1]):
                    at = tuple(0 * i + k for k in index)
                    ref[(*at, pl.ds(0, ref.shape[-1]))] = jnp.zeros(ref.shape[-1:], ref.dtype)

        if kind == "start":
            work(*begin(search, ranks, sampled, operand_refs, 0 * i))
            return
        # All loads first, so that they are under way together.
        common, brackets = load(search, before_refs, r)
        seen = counted(search, before_refs, r)
        going = common[FINITE] > 0 if kind == "turn" else any_open(brackets)

        @pl.when(going)
        def _():
            work(*step(search, ranks, kind, sampled, common, brackets, seen))

        @pl.when(~going)
        def _():
            store(state_out, writes, common, brackets, ())

    shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in [(FIELDS,), (r, FIELDS), (r, w)]]
    name = program.__name__ = f"svgd_rank_{kind}" + ("_sample" if sampled else "")
    first = operand_count + before_count
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
    )


def _finish(search, ranks, before):
    """Values and keys, in one program."""
    r = len(ranks)

    def program(*refs):
        before_refs, (values_ref, keys_ref) = refs[:5], refs[5:]
        common, brackets = load(search, before_refs, r)
        found = tightened(search, ranks, False, brackets, counted(search, before_refs, r))
        unit = power(254 - common[FIELD])  # the reciprocal of the scale
        for q, bracket in enumerate(found):
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
