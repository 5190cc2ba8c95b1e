"""What a search for an order statistic does between looks at distances: plans, brackets, bins, counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import (
    triton_rank,
    triton_rank_bracket,
    triton_rank_plan,
    triton_rank_state,
    triton_rank_wide,
)
from pallas_kernels.triton_rank_bracket import NONE, TOP, Bracket

ON_GPU = jax.default_backend() == "gpu"


def test_plans_of_every_size_cover_every_pair():
    for n in (2, 31, 33, 64, 1000, 2048, 2049, 8193, 20_000, 1 << 20):
        search = triton_rank_plan.plan(n, 20)
        layout = search.layout
        assert layout.pairs_within(layout.offsets) == search.total == n * (n - 1) // 2
        assert 1 <= search.splits <= layout.offsets
        assert search.two_limbs == (n > 65536)
        # Even steps and bins alone finish after the first pass over everything.
        over_all = [kind for kind in search.kinds if not triton_rank_plan.over_sample(kind)]
        bits = [search.width(kind).bit_length() - 1 for kind in over_all]
        assert sum(bits[1:]) == search.bits_left(1) >= triton_rank_bracket.RANGE_BITS


def test_bins_of_one_tile_with_distances_on_the_edges_of_the_bracket():
    def program(u_ref, edges_ref, zeros_ref, counts_ref):
        bracket = Bracket(False, edges_ref[0], edges_ref[1], 0, 0, 0, 0)
        every = pl.ds(0 * edges_ref[0], 32)
        triton_rank_wide.add_tile(counts_ref, 0 * edges_ref[0], u_ref[every, every], bracket)

    counts = jax.ShapeDtypeStruct((1, 1, 32, 32), jnp.float32)
    kernel = pl.pallas_call(
        program,
        out_shape=counts,
        input_output_aliases={2: 0},
        compiler_params=plt.CompilerParams(num_warps=1),
        interpret=not ON_GPU,
    )
    add = jax.jit(kernel)
    rng = np.random.default_rng(0)
    for trial in range(300):
        low = int(rng.integers(-1, TOP - 1)) if trial % 10 else -1
        high = min(TOP, low + int(2 ** rng.uniform(0, 30))) if trial % 10 else TOP
        u = np.full(1024, NONE)
        edges = np.clip([low, low + 1, high - 1, high, high + 1, (low + high) // 2], 0, TOP)
        number = rng.choice([0, 1, 3, 8, 9, 40, 1024])  # one by one up to 8, together beyond
        near = rng.integers(max(low - 5, 0), min(high + 5, TOP), number, endpoint=True)
        values = np.where(rng.random(number) < 0.5, rng.choice(edges, number), near)
        u[rng.permutation(1024)[:number]] = values
        found = add(
            jnp.asarray(u.reshape(32, 32), jnp.int32),
            jnp.array([low, high]),
            jnp.zeros(counts.shape),
        )
        width = 1 << max(0, (high - low - 1).bit_length() - 10)
        inside = u[(u > low) & (u <= high) & (high - low > 1)]  # closed: nothing to find
        expected = np.bincount((inside - low - 1) // width, minlength=1024)
        np.testing.assert_array_equal(np.ravel(found), expected)


@pytest.mark.parametrize("wide", [0, 1, 3])
@pytest.mark.parametrize("many", [1, 2**31 + 12345])
@pytest.mark.parametrize("numbers", ["even", "geometric", "one", "dense"])
def test_brackets_close_in_the_passes_there_are(numbers, many, wide):
    """Each number stands for `many`, so counts beyond 2^31 are exact; no ends are reported."""
    u = {
        "even": np.linspace(0, TOP - 1, 400).astype(np.int64),
        "geometric": np.unique((2.0 ** np.linspace(0, 29.9, 400)).astype(np.int64)),
        "one": np.full(400, 123_456_789),
        "dense": 900_000_000 + np.arange(400) // 3,
    }[numbers]
    search = dataclasses.replace(triton_rank_plan.plan(20, 3), thresholds=64, wide=wide)
    two_limbs = many * len(u) >= 1 << 31

    def limbs(count):
        split = triton_rank_bracket.limbs(count) if two_limbs else (0 * count, count)
        return tuple(jnp.asarray(part, jnp.int32) for part in split)

    for rank in (1, many * len(u) // 2 + (many > 1), many * len(u)):
        bracket = Bracket.whole(two_limbs, many * len(u), jnp.int32(0))
        thresholds = jnp.zeros(8, jnp.int32)  # a first guess that helps nothing
        for done, kind in enumerate(search.kinds, 1):
            w = search.width(kind)
            if kind == "next":
                thresholds = bracket.thresholds(rank, w, search.bits_left(done))
            elif kind == "wide":
                thresholds = triton_rank_wide.last_of_bins(bracket)
            below = np.searchsorted(u, int(bracket.low), side="right") if kind == "wide" else 0
            found = np.searchsorted(u, np.asarray(thresholds), side="right") - below
            counts = bracket.with_below(limbs(many * found), kind == "wide")
            bracket = bracket.tighten(rank, thresholds, counts, None)
        assert not bracket.open()
        assert bracket.high == u[(rank - 1) // many]


class Ref:
    """An array that is read as a kernel reads a reference."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __getitem__(self, index):
        return jnp.asarray(
            self.array[
                tuple(slice(i.start, i.start + i.size) if hasattr(i, "size") else i for i in index)
            ]
        )


@pytest.mark.parametrize("n", [1000, 6000, 70_000, 1 << 20])
def test_counts_of_many_programs_add_up_exactly(n):
    search = triton_rank_plan.plan(n, 20)
    w, programs = search.thresholds, 4 * triton_rank.COPIES
    rng = np.random.default_rng(0)
    largest = min(search.total // programs, 2**31 - 1)
    parts = rng.integers(0, largest, (programs, w), endpoint=True)
    parts[:, -1] = largest
    tally = np.zeros((triton_rank.COPIES, 1, search.limbs, w), np.float32)
    for program, part in enumerate(parts):
        limbs = triton_rank_state.limbs_of(search, jnp.asarray(part, jnp.int32))
        tally[program % triton_rank.COPIES, 0] += np.stack(limbs)
    assert tally.max() <= 1 << 24  # whole numbers that float32 holds
    ends = np.zeros((triton_rank.COPIES, 2), np.int32)
    refs = [None, None, *(Ref(a) for a in (np.zeros((1, w), np.int32), tally, ends))]
    [(_, (high, low), _)] = triton_rank_state.counted(search, "next", refs, 1)
    high = 0 if high is None else np.asarray(high, np.int64)
    np.testing.assert_array_equal((high << 16) + np.asarray(low, np.int64), parts.sum(axis=0))
