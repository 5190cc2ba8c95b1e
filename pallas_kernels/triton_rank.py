"""Order statistics of the squared distances of all pairs of particles: exact, streamed, never
waiting for the host.

A fixed number of launches, each a pass over the tiles of `triton_rank_tiles`: it counts the distances at
or below each of W thresholds, and finds the smallest and the largest inside the bracket, or counts in bins
(`triton_rank_wide`); `triton_rank_plan` says which. Every program of a launch first reads what the launch
before counted, tightens the bracket (`triton_rank_bracket`) and makes the next thresholds, the same in
every program; once the bracket is closed, the launches that remain return at once.

Distances are counted exactly, in whole numbers that float32 holds (Pallas has no atomic addition of vectors
of integers), which add up in any order: the answer, one of the computed distances, is the same in every
call.

Many particles begin with two passes over the tiles nearest to the diagonal, a sample in which every particle
has the same part. It only places the first thresholds. Where the first pass over everything shows
the wanted distance to be small beside the particles' reach, the search begins again by differences.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.triton_rank_bracket import from_u
from pallas_kernels.triton_rank_count import AT_ONCE, BY_VALUE, ONE_BY_ONE, count_below
from pallas_kernels.triton_rank_plan import over_sample, plan
from pallas_kernels.triton_rank_prepare import Operands, prepare
from pallas_kernels.triton_rank_state import (
    DIRECT,
    FIELD,
    FIELDS,
    FINITE,
    any_open,
    begin,
    by_value,
    counted,
    limbs_of,
    load,
    step,
    store,
    tightened,
)
from pallas_kernels.triton_rank_tiles import Distances, is_pair_of_blocks, power
from pallas_kernels.triton_rank_wide import DIGIT, count_bins

MAX_DIMENSION = 512
MAX_PARTICLES = 1 << 20
COPIES = 4  # counters that programs add to, so that they seldom meet


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


def order_statistics(x, ranks, *, interpret=False, search=None):
    """Squared distances |x_i - x_j|^2, i < j, of the given ranks.

    Args:
      x: (N, d) float32. ranks: R static integers in [1, N (N - 1) / 2]; rank 1 is the smallest distance.
      interpret: run under the Pallas interpreter. search: a `Search`, for tests and tuning.

    Returns:
      `Found`.
    """
    search = search or plan(*x.shape, interpret)
    ranks, kinds = tuple(ranks), search.kinds
    operands, tally = prepare(x, search.layout, cleared=_tally(search, len(ranks), kinds[0]))
    arrays = [a for a in operands if a is not None]
    state, totals, before, over_all = [], [], None, 0
    for kind, after in zip(kinds, [*kinds[1:], kinds[-1]], strict=True):
        with_ends = search.ends is not None and over_all >= search.ends
        out = _pass(search, ranks, kind, before, after, with_ends)(*arrays, *state, *totals, *tally)
        state, (counts, ends), tally = out[:3], out[3:5], out[5:]
        if kind == "wide":
            counts = counts.reshape(1, len(ranks), 1, -1)
        totals = [counts, ends]
        before, over_all = kind, over_all + (not over_sample(kind))
    values, keys = _finish(search, ranks, before, [*state, *totals])
    return Found(values, keys, state[0], operands)


def _tally(search, r, kind):
    """Counts of each copy, rank, part and threshold, or bin, and ends of each copy and rank, of one pass."""
    copies = COPIES if search.layout.blocks >= 8 else 1
    counts = copies, r, search.limbs, search.thresholds
    if kind == "wide":
        assert search.limbs == 1, "a wide pass counts in one float32: fewer than 2^24 pairs"
        counts = 1, r, DIGIT, DIGIT
    return [
        jax.ShapeDtypeStruct(counts, jnp.float32),
        jax.ShapeDtypeStruct((copies, 2 * r), jnp.int32),
    ]


# --- one launch --------------------------------------------------------------------------------------


@functools.cache  # JAX then traces and lowers equal passes once
def _pass(search, ranks, kind, before, after, with_ends):
    """A pass over all tiles, or the sampled ones, as a function of arrays: operands, what the pass
    before returned first (nothing for the first one), zeros to count in.

    It returns [common, brackets, thresholds, counts, ends, zeros, zeros].

    Args:
      kind: "start" makes the first thresholds; "next" tightens the bracket first; "turn" goes from
        the bracket in the sample to thresholds for all pairs; "wide" has many bins.
      before: kind of the pass before. after: that of the pass after it, for its zeros.
      with_ends: whether to find the smallest and the largest distance inside the bracket.
    """
    layout, r, w = search.layout, len(ranks), search.width(kind)
    operand_count, before_count = 3 if layout.direct else 5, 0 if before is None else 5
    offsets = min(search.sample, layout.offsets) if over_sample(kind) else layout.offsets
    splits = min(search.splits, offsets)
    tallies = [_tally(search, r, each) for each in (kind, after)]

    def program(*refs):
        operand_refs, refs = refs[:operand_count], refs[operand_count:]
        before_refs, refs = refs[:before_count], refs[before_count + 2 :]
        state_out, (counts_ref, ends_ref), cleared = refs[:3], refs[3:5], refs[5:]
        i, split = pl.program_id(0), pl.program_id(1)
        writes = (i == 0) & (split == 0)

        def count(common, brackets, thresholds, direct, how):
            distances = Distances(layout, operand_refs, common[FIELD], direct)
            walk = (i, split, splits, offsets)
            if kind == "wide":
                count_bins(distances, walk, brackets, counts_ref)
                return
            counts, ends = count_below(distances, walk, brackets, thresholds, with_ends, how)
            copy = (i + split) % counts_ref.shape[0]
            for q, found in enumerate(counts):

                def add(q=q, found=found):
                    for limb, part in enumerate(limbs_of(search, found)):
                        at = (copy, 0 * i + q, 0 * i + limb, pl.ds(0 * i, w))
                        plt.atomic_add(counts_ref, at, part)

                # Most programs have nothing inside a narrow bracket.
                pl.when(jnp.max(found) > 0)(add) if how == BY_VALUE else add()
            for k, end in enumerate(ends):

                @pl.when(end > 0)
                def _(k=k, end=end):
                    plt.atomic_max(ends_ref, (copy, 0 * i + k), end)

        def work(common, brackets, thresholds):
            store(state_out, writes, common, brackets, thresholds)

            # With one tile each, the last offset of an even number leaves half of the programs none.
            going = any_open(brackets) & is_pair_of_blocks(layout, i, split)
            values = by_value(search, kind, brackets)

            def either(going, direct):
                arguments = common, brackets, thresholds, direct
                if values is not True:
                    by_threshold = ONE_BY_ONE if search.one_by_one else AT_ONCE
                    where = going if values is False else going & ~values
                    pl.when(where)(lambda: count(*arguments, by_threshold))
                if values is not False:
                    where = going if values is True else going & values
                    pl.when(where)(lambda: count(*arguments, BY_VALUE))

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

        if before is None:
            work(*begin(search, ranks, kind, operand_refs, 0 * i))
            return
        # All loads first, so that they are under way together.
        common, brackets = load(search, before_refs, r)
        seen = counted(search, before, before_refs, r)
        going = common[FINITE] > 0 if kind == "turn" else any_open(brackets)

        @pl.when(going)
        def _():
            work(*step(search, ranks, kind, before, common, brackets, seen))

        @pl.when(~going)
        def _():
            store(state_out, writes, common, brackets, ())

    shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in [(FIELDS,), (r, FIELDS), (r, w)]]
    name = program.__name__ = f"svgd_rank_{kind}"
    first = operand_count + before_count
    return pl.pallas_call(
        program,
        grid=(layout.blocks, splits),
        in_specs=[pl.BlockSpec()] * (first + 2),
        out_specs=[pl.BlockSpec()] * 7,
        out_shape=shapes + tallies[0] + tallies[1],
        input_output_aliases={first: 3, first + 1: 4},
        compiler_params=plt.CompilerParams(num_warps=layout.warps, num_stages=search.stages),
        interpret=layout.interpret,
        name=name,
    )


def _finish(search, ranks, last, before):
    """Values and keys after a pass of the kind `last`, in one program."""
    r = len(ranks)

    def program(*refs):
        before_refs, (values_ref, keys_ref) = refs[:5], refs[5:]
        common, brackets = load(search, before_refs, r)

        def write(brackets):
            unit = power(254 - common[FIELD])  # the reciprocal of the scale
            for q, bracket in enumerate(brackets):
                keys_ref[q] = bracket.high
                value = from_u(bracket.high) * unit * unit
                values_ref[q] = jnp.where(common[FINITE] > 0, value, jnp.nan)

        @pl.when(any_open(brackets))
        def _():
            seen = counted(search, last, before_refs, r)
            write(tightened(search, ranks, last, brackets, seen))

        pl.when(~any_open(brackets))(lambda: write(brackets))

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
