"""Order statistics of the squared distances of all pairs of particles: exact, streamed, never waiting for the host.

A fixed number of launches, each a pass over the tiles of `triton_rank_tiles`: it counts the distances at or below
each of W thresholds, and finds the smallest and the largest inside the bracket. Every program of a launch first
reads what the launch before counted, tightens the bracket (`triton_rank_bracket`) and makes the next thresholds,
the same in every program; once the bracket is closed, the launches that remain return at once.

Distances are compared as floats and counted in integers, which add up in any order: atomic additions leave the
answer, one of the computed distances, the same in every call.

Many particles begin with two passes over the tiles nearest to the diagonal, a sample in which every particle
has the same part. It only places the first thresholds. Where the first pass over everything shows the wanted distance
to be small beside the particles' reach, the search begins again by differences.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_pairs as pairs
from pallas_kernels import triton_rank_tiles as rank_tiles
from pallas_kernels import triton_tiles as tiles
from pallas_kernels.triton_rank_bracket import (
    LIMB,
    NONE,
    TOP,
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
STEP, DIRECT, FIELD, FINITE, COARSE_U = range(5)
COPIES = 8  # counters that programs add to, so that they seldom meet


@dataclasses.dataclass(frozen=True)
class Search:
    """Static choices. thresholds: W, of each rank and pass; sample: offsets of the sampled tiles; splits over offsets."""

    layout: Layout
    thresholds: int
    sample: int
    splits: int

    @property
    def passes(self):
        return passes(self.thresholds)

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
    """The static choices for n particles in d dimensions."""
    if n <= 2048:  # a launch costs more than its compares; one warp adds up without waiting for others
        size, warps, thresholds, sample, programs = 32, 1, 32, 0, 4
    elif n <= 8192:
        size, warps, thresholds, sample, programs = 64, 4, 16, 4, 3
    else:
        size, warps, thresholds, sample, programs = 128, 8, 16, 2, 2
    layout = Layout(n, d, size, warps, interpret)
    splits = -(-programs * tiles.MULTIPROCESSORS // layout.blocks)
    return Search(layout, thresholds, sample, min(layout.offsets, max(1, splits)))


def order_statistics(x, ranks, *, interpret=False, search=None):
    """Squared distances |x_i - x_j|^2, i < j, of the given ranks.

    Args:
      x: (N, d) float32. ranks: R static integers in [1, N (N - 1) / 2]; rank 1 is the smallest distance.
      interpret: run under the Pallas interpreter. search: a `Search`, for tests and tuning.

    Returns:
      `Found`.
    """
    search = search or plan(*x.shape, interpret)
    layout, r, w = search.layout, len(ranks), search.thresholds
    launches = search.passes + (2 if search.sample else 0)
    copies = COPIES if layout.blocks >= 8 else 1
    cleared = [(launches, copies, r, 2, w), (launches, copies, 2 * r)]
    operands, tally = rank_tiles.prepare(x, layout, cleared=cleared)
    kinds = ["start"] + ["next"] * (search.passes - 1)
    over_sample = [False] * search.passes
    if search.sample:
        kinds = ["start", "next", "turn"] + kinds[1:]
        over_sample = [True, True] + over_sample
    state = ()
    for kind, sampled in zip(kinds, over_sample, strict=True):
        *state, tally[0], tally[1] = _pass(search, ranks, kind, sampled, operands, state, tally)
    return _finish(search, ranks, operands, state, tally)


def _pass(search, ranks, kind, sampled, operands, state, tally):
    """One launch: (common, brackets, thresholds, counts, ends) after it."""
    layout, r, w = search.layout, len(ranks), search.thresholds
    arrays = [a for a in operands if a is not None]
    offsets = min(search.sample, layout.offsets) if sampled else layout.offsets
    splits = min(search.splits, offsets)
    turns = -(-offsets // splits)

    def program(*refs):
        operand_refs, refs = refs[: len(arrays)], refs[len(arrays) :]
        state_refs, refs = refs[: len(state)], refs[len(state) :]
        counts_ref, ends_ref, *outputs = refs[2:]
        outputs = outputs[:0] + list(refs[2 + 2 :])
        return operand_refs, state_refs, counts_ref, ends_ref, outputs

    def body(*refs):
        operand_refs, refs = refs[: len(arrays)], refs[len(arrays) :]
        state_refs, refs = refs[: len(state)], refs[len(state) + 2 :]
        *outputs, counts_ref, ends_ref = refs
        i, split = pl.program_id(0), pl.program_id(1)
        writes = (i == 0) & (split == 0)
        tally_refs = counts_ref, ends_ref

        def work(common, brackets, thresholds):
            _store(outputs, writes, common, brackets, thresholds)
            arguments = (layout, operand_refs, common[FIELD])

            def count(direct):
                distances = Distances(*arguments, direct)
                found = _count(distances, i, split, splits, turns, offsets, brackets, thresholds)
                return _vectors(found, r, w)

            if layout.direct:
                parts = count(True)
            else:
                parts = lax.cond(
                    common[DIRECT] > 0, lambda: count(True), lambda: count(False)
                )
            copy = (i + split) % counts_ref.shape[1]
            step = common[STEP] - 1
            for q, counts in enumerate(parts[:-1]):
                every = pl.ds(0, w)
                # Fewer pairs than 2^31 need one limb only.
                for limb, part in enumerate([counts] if search.total < 1 << 31 else [counts & ((1 << LIMB) - 1), counts >> LIMB]):
                    plt.atomic_add(counts_ref, (step, copy, q, limb, every), part)
            plt.atomic_max(ends_ref, (step, copy, pl.ds(0, 2 * r)), parts[-1])

        if kind == "start":
            common, brackets, thresholds = _begin(search, ranks, sampled, operand_refs, i * 0)
            work(common, brackets, thresholds)
            return
        common, brackets, old = _load(state_refs, r)

        @pl.when(~_any_open(brackets))
        def _():
            if kind == "turn":
                pass
            _store(outputs, writes, common, brackets, old)

        @pl.when(_any_open(brackets))
        def _():
            pass

    del program, body
    return _launch(search, ranks, kind, sampled, operands, state, tally)
