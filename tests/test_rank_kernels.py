"""The kernels that find an order statistic of all distances: exact to the bit, on a GPU or interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jsvgd import compiled_statistic, median_bandwidth
from pallas_kernels import (
    triton_rank,
    triton_rank_plan,
    triton_ties,
)
from pallas_kernels.triton_rank_bracket import NONE, TOP
from pallas_kernels.triton_rank_state import DIRECT, LAUNCH
from tests.problems import relative_error, wide

ON_GPU = jax.default_backend() == "gpu"
KERNELS = "triton" if ON_GPU else "interpret"
KINDS = ["normal", "lattice", "clusters", "far clusters", "coincident", "cauchy", "offset", "equal"]


def cloud(kind, n, d, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    if kind == "lattice":
        x = np.round(x)
    elif kind == "clusters":
        x = 1e-3 * x + 10.0 * rng.integers(0, 3, size=(n, 1))
    elif kind == "far clusters":
        x[: 3 * n // 4] += 1e4
    elif kind == "coincident":
        x = x[rng.integers(0, max(1, n // 3), n)]
    elif kind == "cauchy":
        x = rng.standard_cauchy(size=(n, d))
    elif kind == "offset":
        x = x + 100.0
    elif kind == "equal":
        x = np.full((n, d), 5.0)
    return (scale * x).astype(np.float32)


def small_search(n, d, *, sample=0, splits=2, **options):
    """Many thresholds, one by one, need few passes, which compile sooner under the interpreter."""
    layout = triton_rank_plan.plan(n, d, not ON_GPU).layout
    options = {"thresholds": 64 if ON_GPU else 1024, "one_by_one": True, **options}
    splits, sample = min(splits, layout.offsets), min(sample, layout.offsets)
    return triton_rank_plan.Search(layout, sample=sample, splits=splits, **options)


@functools.cache
def compiled(search, ranks):
    """Everything about the distances of these ranks."""
    options = {"interpret": not ON_GPU, "search": search}

    def everything(x):
        found = triton_rank.order_statistics(x, ranks, **options)
        keys = triton_ties.pair_keys(found, **options)
        return found, keys, triton_ties.laplacian(found, x, **options)

    return jax.jit(everything)


def median_rank(n):
    return max(1, ((n * n - 1) // 2 - n) // 2 + 1)


def distances(x):
    i, j = np.triu_indices(len(x), 1)
    total = np.zeros(len(i))
    for c in range(x.shape[1]):
        total += (wide(x)[i, c] - wide(x)[j, c]) ** 2
    return total


def check(x, ranks, search):
    n, d = x.shape
    count = n * (n - 1) // 2
    found, keys, (sums, twice) = compiled(search, ranks)(x)
    keys = np.asarray(keys)
    counted = np.sort(keys[keys != NONE])
    assert len(counted) == count and (counted <= TOP).all()
    np.testing.assert_array_equal(found.keys, counted[np.array(ranks) - 1])
    exact = np.sort(distances(x))
    extent = np.sum(np.ptp(wide(x), axis=0) ** 2)
    for q, rank in enumerate(ranks):
        # By differences where distances are small beside the extent, so relative errors stay small.
        error = abs(float(found.values[q]) - exact[rank - 1])
        coarse = 1e-6 if d <= 8 or found.common[DIRECT] else 5e-6
        assert error <= coarse * exact[rank - 1] + 1e-15 * extent + 1e-37, (
            q,
            error,
            exact[rank - 1],
        )
        # The pairs that tie, by their places in the tiles.
        size = search.layout.size
        block, offset, row, column = np.nonzero(keys == found.keys[q])
        i = block * size + row
        j = (block + offset) % search.layout.blocks * size + column
        assert twice[q] == 2 * len(i)
        expected = np.zeros((n, d))
        difference = wide(x)[i] - wide(x)[j]
        np.add.at(expected, i, difference)
        np.add.at(expected, j, -difference)
        magnitude = np.abs(wide(x)).max() * max(1, len(i) / n)
        np.testing.assert_allclose(sums[q], expected, atol=3e-6 * magnitude)


TWO_RANKS = [(33, 3), (40, 3), (70, 12)]  # one for each way to count; each rank is compiled anew


@pytest.mark.parametrize(
    "shape, options",
    [
        ((2, 1), {}),
        ((33, 3), {}),
        (
            (33, 4),
            {"few": 10**6, "ends": None},
        ),  # by value, or by threshold where a tile has much
        (
            (40, 3),
            {"few": 300, "thresholds": 64},
        ),  # by value in some passes, by threshold in others
        ((40, 3), {"wide": 3, "ends": None}),
        ((96, 2), {"splits": 1}),  # a whole tile between two others
        ((33, 70), {}),  # two chunks of dimensions
        ((70, 12), {"ends": None, "one_by_one": False, "thresholds": 8}),
        pytest.param(
            (150, 70),
            {"sample": 2, "splits": 1},
            marks=pytest.mark.skipif(
                not ON_GPU,
                reason="the interpreter is too slow for eight kinds at this size",
            ),
        ),
    ],
    ids=str,
)
def test_the_sorted_element_to_the_bit(shape, options):
    n, d = shape
    ranks = median_rank(n), median_rank(n) + 1
    ranks = ranks[: 2 if shape in TWO_RANKS else 1]
    for seed, kind in enumerate(KINDS):
        for scale in (1e-20, 1.0, 1e15) if kind == "normal" else (1.0,):
            check(cloud(kind, n, d, seed, scale), ranks, small_search(n, d, **options))
    for bad in (np.nan, np.inf, -np.inf):
        x = cloud("normal", n, d)
        x[n // 2, d // 2] = bad
        assert np.isnan(compiled(small_search(n, d, **options), ranks)(x)[0].values).all()


def test_extreme_ranks():
    for kind in ("normal", "clusters", "lattice"):
        check(cloud(kind, 40, 3), (1, 780), small_search(40, 3))


def test_a_search_that_begins_again_forgets_its_bracket():
    """The smallest distances beside an outlier: the bracket found by products does not hold them."""
    x = cloud("normal", 65, 20)
    x[3] += 1e6
    check(x, (1,), triton_rank_plan.plan(65, 20, not ON_GPU))


def test_copies_of_counters_beside_wide_passes():
    n, d = (1000, 32) if ON_GPU else (260, 3)
    search = triton_rank_plan.plan(n, d, not ON_GPU)
    assert search.wide and search.layout.blocks >= 8
    for kind in ("normal", "clusters"):
        check(cloud(kind, n, d), (median_rank(n), median_rank(n) + 1), search)


def test_typical_particles_need_few_passes():
    search = small_search(150, 70, sample=2, splits=1, thresholds=8)
    options = {"interpret": not ON_GPU, "search": search}
    order_statistics = functools.partial(triton_rank.order_statistics, **options)
    found = jax.jit(order_statistics, static_argnums=1)(
        cloud("normal", 150, 70), (median_rank(150),)
    )
    launches = int(found.common[LAUNCH]) + 1
    assert 3 <= launches <= 7  # two over the sample; 8 thresholds a pass


# --- through the public function --------------------------------------------------------------------


def bandwidth(implementation, **options):
    return functools.partial(median_bandwidth, implementation=implementation, **options)


def test_bandwidth_gradient_and_hessian_by_two_ways():
    x = jnp.asarray(cloud("normal", 40, 12))

    def everything(implementation):
        def root(x):
            return jnp.sqrt(median_bandwidth(x, implementation=implementation))

        value, gradient = jax.value_and_grad(root)(x)
        return value, gradient, jax.hessian(root)(x), jax.jacrev(jax.jacrev(root))(x)

    found, expected = jax.jit(everything, static_argnums=0)(KERNELS), everything("dense")
    for part, whole in zip(found, expected, strict=True):
        assert relative_error(part, whole) < 1e-5
    assert np.count_nonzero(np.any(found[1] != 0, axis=1)) == 2


def test_several_tiles_a_program_of_the_gradient(monkeypatch):
    x = cloud("lattice", 70, 3)
    search = small_search(70, 3)
    found, _, (expected, twice) = compiled(search, (median_rank(70),))(x)
    monkeypatch.setattr(triton_ties.tiles, "MULTIPROCESSORS", 1)
    sums, again = triton_ties.laplacian(found, x, interpret=not ON_GPU, search=search)
    assert twice[0] == again[0] > 2
    np.testing.assert_allclose(sums, expected, atol=1e-4)


def beside_an_outlier(d):
    x = cloud("normal", 40, d)
    x[5] += 1e8
    expected = jax.grad(bandwidth("dense", rule="no_log"))(jnp.asarray(x))
    return x, expected


def test_float32_under_x64(x64):
    x = jnp.asarray(cloud("normal", 40, 12))
    value, gradient = jax.jit(jax.value_and_grad(bandwidth(KERNELS)))(x)
    assert value.dtype == gradient.dtype == jnp.float32
    expected = jax.value_and_grad(bandwidth("dense"))(x)
    assert relative_error(value, expected[0]) < 1e-5
    assert relative_error(gradient, expected[1]) < 1e-5


def test_gradient_is_the_mean_over_ties_and_right_beside_an_outlier():
    x, right = beside_an_outlier(3)
    together = jnp.stack([cloud("lattice", 40, 3), x])
    h = bandwidth(KERNELS, rule="no_log")
    (value, _), (gradient, beside) = jax.jit(jax.vmap(jax.value_and_grad(h)))(together)
    assert relative_error(beside, right) < 1e-6
    x = together[0]
    i, j = np.triu_indices(40, 1)
    squared = np.sum((wide(x)[i] - wide(x)[j]) ** 2, axis=1)
    middle = np.sort(squared)[median_rank(40) - 1]
    tied = np.flatnonzero(squared == middle)
    assert len(tied) > 1
    expected = np.zeros((40, 3))
    for t in tied:
        expected[i[t]] += 2 * (wide(x)[i[t]] - wide(x)[j[t]]) / len(tied)
        expected[j[t]] -= 2 * (wide(x)[i[t]] - wide(x)[j[t]]) / len(tied)
    np.testing.assert_allclose(gradient, expected * float(value) / middle, atol=1e-6)


def test_the_same_bits_in_every_context():
    outlier, right = beside_an_outlier(12)
    x = jnp.stack([*(cloud(kind, 40, 12, 7) for kind in KINDS), outlier])
    h = jax.jit(bandwidth(KERNELS, rule="no_log"))
    alone = np.array([h(row) for row in x])
    np.testing.assert_array_equal(np.array([h(row) for row in x]), alone)
    np.testing.assert_array_equal(lax.scan(lambda _, row: (0, h(row)), 0, x)[1], alone)
    together, gradients = jax.jit(jax.vmap(jax.value_and_grad(h)))(x)
    np.testing.assert_array_equal(together, alone)
    # NaN if the distances came out differently there.
    assert np.isfinite(gradients).all()
    assert relative_error(gradients[-1], right) < 1e-6


@pytest.mark.parametrize("rule", ["liu", "pyro"])  # two ranks at once; one dimension at a time
def test_rules(rule):
    x = jnp.asarray(cloud("normal", 30, 3))
    found = median_bandwidth(x, rule=rule, implementation=KERNELS)
    expected = median_bandwidth(x, rule=rule, implementation="dense")
    np.testing.assert_allclose(found, expected, rtol=3e-6)


@pytest.mark.parametrize("n", [1, 2])
def test_few_particles(n):
    x = jnp.asarray(cloud("normal", n, 4))
    found = median_bandwidth(x, rule="no_log", implementation=KERNELS)
    np.testing.assert_allclose(
        found, median_bandwidth(x, rule="no_log", implementation="dense"), rtol=2e-6
    )


def test_refusals():
    x = jnp.zeros((5, 600))
    with pytest.raises(ValueError, match=r"'interpret' does not take this: d must lie in"):
        median_bandwidth(x, implementation="interpret")
    with jax.enable_x64(True), pytest.raises(ValueError, match="compute in float32, got float64"):
        median_bandwidth(jnp.zeros((5, 2), jnp.float64), implementation="triton")


def test_choice(monkeypatch):
    def choice(n=1000, d=32, dtype=np.float32, platform="gpu"):
        return compiled_statistic.choose(n, d, dtype=dtype, platform=platform)

    monkeypatch.setattr("jsvgd.dispatch._compute_capability", lambda: 9.0)
    assert choice().implementation == "triton"
    for other, why in [
        (choice(platform="cpu"), "do not run on cpu"),
        (choice(dtype=np.float64), "got float64"),
        (choice(d=1000), "d must lie in"),
    ]:
        assert other.implementation == "xla" and why in other.reason
    monkeypatch.setattr("jsvgd.dispatch._compute_capability", lambda: 7.5)
    assert choice().implementation == "xla"


# --- lowered for CUDA on a machine without a GPU ------------------------------------------------------


@pytest.mark.skipif(
    not hasattr(jax.sharding, "AbstractDevice") or jax.__version_info__ < (0, 11),
    reason="lowering for CUDA without a GPU needs JAX >= 0.11",
)
@pytest.mark.parametrize("n, d", [(50, 2), (1000, 32), (4096, 64), (70_000, 300)])
def test_lowers_without_a_loop_or_a_condition(n, d):
    """XLA runs loops and conditionals from the host, which waits for the device each time."""
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "cuda")
    search = triton_rank_plan.plan(n, d)
    launches = len(search.kinds)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        for batch in ((), (3,)):
            function = jax.value_and_grad(bandwidth("triton"))
            function = jax.vmap(function) if batch else function
            x = jax.ShapeDtypeStruct((*batch, n, d), jnp.float32)
            text = jax.jit(function).trace(x).lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("xla.gpu.triton") == launches + 3  # prepare, finish, ties
            for name in {*search.kinds, "prepare", "finish", "ties"}:
                assert f"svgd_rank_{name}" in text
            assert not any(f"stablehlo.{op}" in text for op in ("while", "case", "if"))
