"""The streamed order statistic against sorting: to the bit, in every regime, with its gradient."""

import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

from jsvgd import order_statistic, pairs, rank_search
from jsvgd.order_statistic import order_statistics
from tests.problems import relative_error, wide

# Few shapes, since each compiles; N above and below the sizes of one block and of one sample.
SHAPES = [(2, 1), (3, 2), (5, 12), (17, 8), (64, 3), (300, 20), (513, 2), (1000, 10), (3000, 2)]


def cloud(kind, n, d, scale, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    if kind == "lattice":
        x = np.round(x)
    elif kind == "clusters":
        x = x * 1e-3 + rng.integers(0, 3, size=(n, 1)) * 10.0
    elif kind == "coincident":
        x = x[rng.integers(0, max(1, n // 3), n)]
    elif kind == "heavy tails":
        x = rng.standard_cauchy(size=(n, d))
    elif kind == "outlier":
        x[0] = 1e4
    elif kind == "offset":
        x = x + 100.0
    elif kind == "equal":
        x = np.full((n, d), 0.1)
    return (x * scale).astype(np.float32)


KINDS = ["normal", "lattice", "clusters", "coincident", "heavy tails", "outlier", "offset", "equal"]


def median_rank(n):
    return max(1, ((n * n - 1) // 2 - n) // 2 + 1)


jitted = jax.jit(order_statistics, static_argnums=1)


@functools.cache
def compiled(n, ranks):
    return jax.jit(lambda x: order_statistic._select(x, ranks))


def by_differences(n, d):
    return pairs.prepare(np.zeros((n, d), np.float32)).centred is None


def power_of_two(x):
    largest = float(np.max(np.abs(x)))
    return 2.0 ** (math.frexp(largest)[1] - 1) if largest else 1.0


def numpy_keys(x):
    """Differences squared and added from first to last, each operation rounded."""
    i, j = np.triu_indices(len(x), 1)
    x = x / np.float32(power_of_two(x))
    total = np.zeros(len(i), x.dtype)
    for c in range(x.shape[1]):
        total = total + (x[i, c] - x[j, c]) ** 2
    return total.view(np.int32 if x.dtype == np.float32 else np.int64)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    shape=st.sampled_from(SHAPES),
    kind=st.sampled_from(KINDS),
    exponent=st.floats(-20, 15),
    seed=st.integers(0, 2**31),
)
def test_equals_the_sorted_element_to_the_bit(shape, kind, exponent, seed):
    n, d = shape
    count = n * (n - 1) // 2
    ranks = tuple(sorted({1, median_rank(n), count}))
    x = cloud(kind, n, d, 10**exponent, seed)
    values, keys, blocks = (np.asarray(a) for a in compiled(n, ranks)(x))
    sorted_keys = np.partition(blocks.ravel(), np.array(ranks) - 1)
    np.testing.assert_array_equal(keys, sorted_keys[np.array(ranks) - 1])
    assert (blocks != pairs.masked_key(np.float32)).sum() == count
    if by_differences(n, d):
        independent = np.partition(numpy_keys(x), np.array(ranks) - 1)
        np.testing.assert_array_equal(keys, independent[np.array(ranks) - 1])
    # Against float64, where the square is a normal float32.
    i, j = np.triu_indices(n, 1)
    exact = np.zeros(count)
    for c in range(d):
        exact += (wide(x)[i, c] - wide(x)[j, c]) ** 2
    exact = np.partition(exact, np.array(ranks) - 1)[np.array(ranks) - 1]
    # The expansion's error is some units in the last place of the largest norm.
    error = np.abs(values - exact)
    extent = 0 if by_differences(n, d) else np.ptp(wide(x), axis=0) ** 2
    allowed = 1e-6 * exact + 1e-6 * np.sum(extent) + 1e-37
    assert (error <= allowed).all(), (values, exact)


@pytest.mark.parametrize("shape", [(3, 2), (65, 5), (300, 12)])
@pytest.mark.parametrize("kind", KINDS)
def test_float64(x64, shape, kind):
    n, d = shape
    ranks = tuple(sorted({1, median_rank(n), n * (n - 1) // 2}))
    x = wide(cloud(kind, n, d, 1.0, 0))
    values = jitted(x, ranks)
    i, j = np.triu_indices(n, 1)
    exact = np.sort(np.sum((x[i] - x[j]) ** 2, axis=1))[np.array(ranks) - 1]
    extent = 0 if by_differences(n, d) else np.sum(np.ptp(x, axis=0) ** 2)
    assert (np.abs(values - exact) <= 1e-14 * (exact + extent)).all()


def test_streamed_blocks_give_the_stored_answer(monkeypatch):
    x = cloud("normal", 700, 5, 1.0, 3)
    rank = (median_rank(700),)

    def value_and_gradient():
        jax.clear_caches()
        return jax.value_and_grad(lambda x: order_statistics(x, rank)[0])(jnp.asarray(x))

    stored = value_and_gradient()
    monkeypatch.setattr(pairs, "STORED_ELEMENTS", 0)
    monkeypatch.setattr(pairs, "BLOCK_ELEMENTS", 2**15)
    assert pairs.PairLayout.of(700).groups > 1 and not pairs.PairLayout.of(700).stored
    streamed = value_and_gradient()
    assert stored[0] == streamed[0] > 0
    np.testing.assert_allclose(stored[1], streamed[1], rtol=1e-6)
    jax.clear_caches()


@pytest.mark.parametrize("d", [2, 20])
def test_streamed_for_real(d):
    x = cloud("normal", 6000, d, 1.0, 3)
    assert not pairs.PairLayout.of(6000).stored
    rank = median_rank(6000)
    value, gradient = jax.value_and_grad(lambda x: order_statistics(x, (rank,))[0])(x)
    key = np.float32(value / power_of_two(x) ** 2).view(np.int32)
    assert key == np.partition(numpy_keys(x), rank - 1)[rank - 1]
    assert np.count_nonzero(np.any(gradient != 0, axis=1)) >= 2


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 100, 191, 192, 193, 1000, 5000, 20000, 1_000_000])
def test_layout_meets_every_pair_of_blocks_once(n):
    layout = pairs.PairLayout.of(n)
    assert layout.padded >= n and layout.blocks % 2 == 1
    assert layout.columns * layout.groups == (layout.blocks + 1) // 2 * layout.rows
    assert layout.rows * layout.columns < 2**22
    offsets = np.arange((layout.blocks + 1) // 2)
    met = {
        frozenset((int(i), int(i + o) % layout.blocks))
        for i in range(min(layout.blocks, 50))
        for o in offsets
    }
    if layout.blocks <= 50:
        assert len(met) == layout.blocks * (layout.blocks + 1) // 2


def test_memory_does_not_grow_with_the_square():
    def temporary(function, n):
        x = jax.ShapeDtypeStruct((n, 10), jnp.float32)
        return jax.jit(function).lower(x).compile().memory_analysis().temp_size_in_bytes

    for n in (20_000, 200_000):

        def median(x):
            return order_statistics(x, (x.shape[0] ** 2 // 4,))[0]

        assert temporary(median, n) < 100e6
        assert temporary(jax.grad(median), n) < 100e6 + 40 * 10 * n


def test_counts_are_exact_integers():
    limit = 1 << rank_search.LIMB
    for value in (0, 1, limit - 1, limit, 5 * limit + 7, 10**12):
        for small in (0, 1, limit - 1):
            total = rank_search.Count.of(value).add(jnp.int32(small))
            assert total.equals(rank_search.Count.of(value + small))
            assert total.at_least(rank_search.Count.of(value + small))
            assert not total.at_least(rank_search.Count.of(value + small + 1))
            np.testing.assert_allclose(total.minus(rank_search.Count.of(1)), value + small - 1)


def test_counts_beyond_two_limbs_of_int32():
    """Every key stands for 2**31 pairs: the search must pick the right one at the limits."""
    rng = np.random.default_rng(0)
    keys = np.sort(rng.integers(0, 2**31 - 2, 1000).astype(np.int32))
    many = 2**31

    def one_pass(thresholds, low, high):
        counts = jnp.sum(keys <= thresholds[:, None], axis=1, dtype=jnp.int32)
        counts = rank_search.Count(2 * counts, jnp.zeros_like(counts))
        smallest = jnp.min(jnp.where(keys > low[:, None], keys, 2**31 - 1), axis=1)
        largest = jnp.max(jnp.where(keys <= high[:, None], keys, -1), axis=1)
        return rank_search.Tally(counts, smallest, largest)

    for sample in (keys[::10], np.zeros(8, np.int32), np.full(8, 2**31 - 2, np.int32)):
        ranks = (1, many, many + 1, 500 * many, 500 * many + 1, 1000 * many)
        found = rank_search.search(one_pass, ranks, 1000 * many, jnp.asarray(sample))
        np.testing.assert_array_equal(found, [keys[(rank - 1) // many] for rank in ranks])


def test_a_pass_that_only_counts_is_enough_and_bounded():
    """Keys that interpolation cannot guess, and no report of the bracket's ends."""
    keys = np.unique((2.0 ** np.linspace(0, 30.99, 400)).astype(np.int32))
    passes = []

    def one_pass(thresholds, low, high):
        jax.debug.callback(lambda: passes.append(1))
        counts = jnp.sum(keys <= thresholds[:, None], axis=1, dtype=jnp.int32)
        return rank_search.Tally(rank_search.Count(jnp.zeros_like(counts), counts), None, None)

    for rank in (1, 17, len(keys)):
        passes.clear()
        found = rank_search.search(one_pass, (rank,), len(keys), jnp.zeros(4, jnp.int32))
        jax.effects_barrier()
        assert found[0] == keys[rank - 1]
        assert len(passes) <= 40


@pytest.mark.parametrize("d", [3, 12])
def test_the_same_bits_in_every_context(d):
    rank = (median_rank(200),)
    x = jnp.stack([cloud(kind, 200, d, 1.0, 7) for kind in KINDS])
    function = jax.jit(lambda x: order_statistics(x, rank)[0])
    alone = np.array([function(row) for row in x])
    for _ in range(10):
        np.testing.assert_array_equal(np.array([function(row) for row in x]), alone)
    np.testing.assert_array_equal(lax.map(function, x), alone)
    # The gradient finds the tied pairs by their bits: NaN if they differed.
    gradient = jax.grad(lambda x: order_statistics(x, rank)[0])
    one_by_one = np.array([jax.jit(gradient)(row) for row in x])
    assert np.isfinite(one_by_one).all()
    values, together = jax.jit(jax.vmap(jax.value_and_grad(function)))(x)
    np.testing.assert_array_equal(values, alone)
    for row, expected in zip(together, one_by_one, strict=True):
        assert relative_error(row, expected) < 1e-5 or np.abs(expected).max() < 1e-10


def dense_ties(x, rank):
    """Value, gradient, and mean over the tied pairs, straight from the definition."""
    n = len(x)
    i, j = np.triu_indices(n, 1)
    squared = np.sum((x[i] - x[j]) ** 2, axis=1)
    value = np.sort(squared)[rank - 1]
    tied = np.flatnonzero(squared == value)
    gradient = np.zeros_like(x)
    for t in tied:
        gradient[i[t]] += 2 * (x[i[t]] - x[j[t]]) / len(tied)
        gradient[j[t]] -= 2 * (x[i[t]] - x[j[t]]) / len(tied)
    return value, gradient, len(tied)


@functools.partial(jax.jit, static_argnums=2)
def value_gradient_tangent(x, dx, rank):
    function = lambda x: order_statistics(x, (rank,))[0]
    return *jax.value_and_grad(function)(x), jax.jvp(function, (x,), (dx,))[1]


@pytest.mark.parametrize("n, d", [(4, 1), (150, 3), (700, 3)])  # the last in several blocks
@pytest.mark.parametrize("kind", ["normal", "lattice", "coincident"])
def test_gradient_is_the_mean_over_tied_pairs(x64, n, d, kind):
    x = wide(cloud(kind, n, d, 1.0, 5))
    rank = median_rank(n) + 2
    value, gradient, ties = dense_ties(x, rank)
    if kind == "lattice" and n > 4:
        assert ties > 1
    dx = np.random.default_rng(0).normal(size=x.shape)
    found, slope, tangent = value_gradient_tangent(x, dx, rank)
    assert found == value
    np.testing.assert_allclose(slope, gradient, atol=1e-12)
    np.testing.assert_allclose(tangent, np.sum(gradient * dx), rtol=1e-10)


@pytest.mark.parametrize("shape", [(30, 2), (200, 12)])
def test_second_derivatives(x64, shape):
    n, d = shape
    x = jnp.asarray(wide(cloud("normal", n, d, 1.0, 1)))
    dx = jnp.asarray(np.random.default_rng(2).normal(size=x.shape))
    rank = median_rank(n)

    def dense(x):
        i, j = np.triu_indices(n, 1)
        return jnp.sqrt(jnp.sort(jnp.sum((x[i] - x[j]) ** 2, axis=1))[rank - 1])

    def streamed(x):
        return jnp.sqrt(order_statistics(x, (rank,))[0])

    @functools.partial(jax.jit, static_argnums=0)
    def products(function):
        forward = jax.jvp(jax.grad(function), (x,), (dx,))[1]
        reverse = jax.grad(lambda x: jnp.vdot(jax.grad(function)(x), dx))(x)
        return jnp.stack([forward, reverse])

    assert relative_error(products(streamed), products(dense)) < 1e-12


def test_two_ranks_at_once():
    x = cloud("normal", 100, 12, 1.0, 4)
    i, j = np.triu_indices(100, 1)
    both = jax.jacobian(lambda x: order_statistics(x, (10, 4000)))(x)
    for row, rank in zip(both, (10, 4000), strict=True):
        one = jax.grad(lambda x, rank=rank: order_statistics(x, (rank,))[0])(x)
        np.testing.assert_array_equal(row, one)
        assert np.count_nonzero(np.any(row != 0, axis=1)) == 2
    expected = np.sort(np.sum((wide(x)[i] - wide(x)[j]) ** 2, axis=1))[[9, 3999]]
    np.testing.assert_allclose(order_statistics(x, (10, 4000)), expected, rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("d", [2, 12])
def test_not_finite_gives_nan(bad, d):
    x = cloud("normal", 50, d, 1.0, 0)
    x[17, 1] = bad
    assert np.isnan(jitted(x, (300,))).all()


@pytest.mark.parametrize("distance", [160, 1e4])
def test_clusters_far_apart_keep_their_digits(distance):
    """At 1e4 widths the expansion |x|^2 + |y|^2 - 2 x.y has no digit of the median left, at 160 three."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 20))
    x[:200] += distance
    x = x.astype(np.float32)
    i, j = np.triu_indices(400, 1)
    exact = np.sort(np.sum((wide(x)[i] - wide(x)[j]) ** 2, axis=1))
    # Within a cluster, and between two.
    ranks = (median_rank(400) - 500, median_rank(400) + 5000)
    assert not by_differences(400, 20) and exact[ranks[1] - 1] > 100 * exact[ranks[0] - 1]
    values = order_statistics(jnp.asarray(x), ranks)
    np.testing.assert_allclose(values, exact[np.array(ranks) - 1], rtol=1e-6)
