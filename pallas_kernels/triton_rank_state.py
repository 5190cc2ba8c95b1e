"""The state of a rank search between launches: read, moved on and written by every program of a launch.

`common` is a list of integers at the places below; beside it a `Bracket` and W thresholds a rank.
`search` is a `triton_rank_plan.Search`.
"""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_tiles as tiles
from pallas_kernels.triton_rank_bracket import (
    LIMB,
    NONE,
    RANGE_BITS,
    Bracket,
    first_thresholds,
    to_u,
)
from pallas_kernels.triton_rank_plan import DIGITS, over_sample
from pallas_kernels.triton_rank_tiles import COARSE, INFINITE, power, scale_field
from pallas_kernels.triton_rank_wide import last_of_bins

LAUNCH, DIRECT, FIELD, FINITE, COARSE_U = range(5)
FIELDS = 8  # of a bracket, and of what all brackets share: powers of two


def begin(search, ranks, kind, operand_refs, zero):
    """common, brackets and thresholds from what `prepare` found."""
    layout, w, sampled = search.layout, search.thresholds, over_sample(kind)
    _, extents_ref, moments_ref = operand_refs[:3]
    padded = tiles.next_power_of_two(layout.blocks)
    every = pl.ds(zero, padded)
    inside = zero + jnp.arange(padded) < layout.blocks
    extents = plt.load(extents_ref.at[every], mask=inside, other=0)
    sums, squares, norms = (
        plt.load(moments_ref.at[zero + k, every], mask=inside, other=0.0) for k in range(3)
    )
    extent = jnp.max(extents)
    # Coincident particles have no extent, but coordinates that differences must not scale to infinity.
    field = jnp.where(extent > 0, scale_field(extent), 127)
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


def by_value(search, kind, brackets):
    """Whether a pass counts what lies inside the brackets alone, by value or bin: True, False or traced."""
    if kind != "next" or not search.few:
        return kind == "wide"
    return sum(bracket.inside() for bracket in brackets) <= float(search.few)


def step(search, ranks, kind, before, common, brackets, seen):
    """common, brackets and thresholds after the launch before this one, of the kind `before`."""
    layout, w = search.layout, search.width(kind)
    brackets = tightened(search, ranks, before, brackets, seen)
    launch, direct, field, finite, coarse = common
    whole = Bracket.whole(search.two_limbs, search.total, 0 * launch)
    if not (over_sample(before) or layout.direct):
        small = brackets[0].high <= coarse
        for bracket in brackets[1:]:
            small |= bracket.high <= coarse
        again = small & (direct == 0)
        direct = jnp.where(again, 1, direct)
        brackets = [whole.where(again, bracket) for bracket in brackets]
    over_all = launch + 2 - (2 if search.sample else 0)  # passes, with the next one
    thresholds = []
    for rank, bracket in zip(ranks, brackets, strict=True):
        if kind == "turn":
            wanted = _sample_rank(search, rank)
            found = bracket.thresholds(wanted, w, RANGE_BITS, search.sampled)
            if not layout.direct:
                found = jnp.where(jnp.arange(w) == 0, coarse, found)
        elif over_sample(kind):
            found = bracket.thresholds(_sample_rank(search, rank), w, RANGE_BITS)
        elif kind == "wide":
            found = last_of_bins(bracket)
        else:
            found = bracket.thresholds(rank, w, search.bits_left(over_all))
        thresholds.append(found)
    if kind == "turn":
        brackets = [whole] * len(ranks)
    return [launch + 1, direct, field, finite, coarse], brackets, thresholds


def _sample_rank(search, rank):
    return min(max(1, round(rank * search.sampled / search.total)), search.sampled)


def limbs_of(search, count):
    """A count in the float32 parts, lowest first, whose sums over programs `counted` puts together."""
    parts = []
    for _ in range(search.limbs - 1):
        parts.append(count & ((1 << DIGITS) - 1))
        count = count >> DIGITS
    return [part.astype(jnp.float32) for part in (*parts, count)]


def counted(search, before, before_refs, r):
    """(thresholds, counts, ends) of each rank in the launch before this one, as `Bracket.tighten`
    takes them."""
    thresholds_ref, counts_ref, ends_ref = before_refs[2:]
    every = pl.ds(0, thresholds_ref.shape[-1])
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
        if before == "wide":
            counts = None, jnp.cumsum(counts[1])
        largest, smallest = (
            functools.reduce(jnp.maximum, [ends_ref[c, 2 * q + side] for c in copies])
            for side in (0, 1)
        )
        ends = largest > 0, NONE - smallest, largest - 1  # not found where nobody looked for them
        found.append((thresholds_ref[q, every], counts, ends))
    return found


def tightened(search, ranks, before, brackets, seen):
    """The brackets after a pass of the kind `before`."""
    inside_alone = by_value(search, before, brackets)
    found = []
    for rank, bracket, (thresholds, counts, ends) in zip(ranks, brackets, seen, strict=True):
        if inside_alone is not False:
            counts = bracket.with_below(counts, inside_alone)
        wanted = _sample_rank(search, rank) if over_sample(before) else rank
        found.append(bracket.tighten(wanted, thresholds, counts, ends))
    return found


def any_open(brackets):
    found = brackets[0].open()
    for bracket in brackets[1:]:
        found |= bracket.open()
    return found


def load(search, before_refs, r):
    common_ref, brackets_ref = before_refs[:2]
    common = [common_ref[k] for k in range(COARSE_U + 1)]
    fields = range(len(Bracket.FIELDS))
    return common, [
        Bracket(search.two_limbs, *(brackets_ref[q, k] for k in fields)) for q in range(r)
    ]


def store(state_refs, writes, common, brackets, thresholds):
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
