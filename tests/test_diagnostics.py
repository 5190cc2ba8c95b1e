"""Discrepancies against recorded values of other packages and dense formulas; thinning; collapse."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsvgd.bandwidth import median_bandwidth
from jsvgd.composite import FunctionKernel, LinearKernel
from jsvgd.diagnostics import (
    collapse_summary,
    ksd,
    ksd_contributions,
    laplace_variance,
    mmd,
)
from jsvgd.kernels import IMQ, RadialKernel
from jsvgd.thinning import stein_thinning
from tests.problems import draw, relative_error, wide


def recorded_cases(reference_data):
    with open(reference_data / "ksd" / "ksd_reference.json") as file:
        cases = json.load(file)["cases"]
    for case in cases.values():
        x, s = np.array(case["x"]), np.array(case["score"])
        for scale, values in case["values"].items():
            length = 1.0 if scale == "l=1" else case["median_pairwise_distance"]
            for kernel in ("imq", "rbf"):
                yield x, s, length, kernel, "v", values[f"{kernel}_V_sqrt_numpy"]
                yield x, s, length, kernel, "u", values[f"{kernel}_U2_numpy"]


@pytest.mark.parametrize("dtype, digits", [(np.float64, 1e-12), (np.float32, 1e-4)])
def test_ksd_is_what_three_packages_recorded(x64, reference_data, dtype, digits):
    count = 0
    for x, s, length, kernel, statistic, expected in recorded_cases(reference_data):
        x, s = x.astype(dtype), s.astype(dtype)
        options = {"kernel": kernel, "statistic": statistic}
        value = ksd(x, s, bandwidth=length**2, **options)
        assert value.dtype == dtype
        np.testing.assert_allclose(value, expected, rtol=digits)
        if length != 1.0:  # the default length scale is the median distance
            np.testing.assert_allclose(ksd(x, s, **options), expected, rtol=digits)
            count += 1
    assert count >= 8


def dense_stein(x, s, h, profile):
    """k_p from the definition, every derivative by autodiff."""

    return stein_matrix(lambda x, y: profile(jnp.sum((x - y) ** 2 / h) / 2), x, s)


@functools.partial(jax.jit, static_argnums=0)
def stein_matrix(k, x, s):
    """The same for any k."""

    def k_p(x, s, y, t):
        cross = jax.jacfwd(jax.grad(k, 1), 0)(x, y)
        return (
            jnp.vdot(s, t) * k(x, y)
            + jnp.vdot(s, jax.grad(k, 1)(x, y))
            + jnp.vdot(t, jax.grad(k, 0)(x, y))
            + jnp.trace(cross)
        )

    row = jax.vmap(k_p, (None, None, 0, 0))
    return jax.vmap(row, (0, 0, None, None))(x, s, x, s)


PROFILES = {
    "rbf": lambda u: jnp.exp(-u),
    "imq": lambda u: (1 + 2 * u) ** -0.5,
    "student": lambda u: 1 / (1 + u),
}


@pytest.mark.parametrize("kernel", PROFILES)
@pytest.mark.parametrize("n, d", [(1, 2), (7, 3), (40, 12)])
@pytest.mark.parametrize("vector", [False, True])
def test_ksd_is_the_definition(x64, kernel, n, d, vector):
    x, s = draw(n, d, dtype=np.float64, offset=5.0)
    h = np.linspace(0.5, 2.0, d) * d if vector else 1.5 * d
    matrix = dense_stein(x, s, h, PROFILES[kernel])
    named = RadialKernel("student", PROFILES["student"]) if kernel == "student" else kernel
    options = {"bandwidth": h, "kernel": named}
    np.testing.assert_allclose(
        ksd_contributions(x, s, **options), np.mean(matrix, axis=1), rtol=1e-9
    )
    np.testing.assert_allclose(ksd(x, s, **options), np.sqrt(np.mean(matrix)), rtol=1e-10)
    if n > 1:
        off = np.sum(matrix, axis=1) - np.diagonal(matrix)
        found = ksd_contributions(x, s, statistic="u", **options)
        np.testing.assert_allclose(found, off / (n - 1), rtol=1e-9, atol=1e-12)


def test_ksd_gradient_is_that_of_the_definition(x64):
    x, s = draw(30, 4, dtype=np.float64)

    def dense(x, s, h):
        return jnp.sqrt(jnp.mean(dense_stein(x, s, h, PROFILES["imq"])))

    streamed = jax.jit(jax.grad(lambda x, s, h: ksd(x, s, bandwidth=h), (0, 1, 2)))(x, s, 3.0)
    written_out = jax.jit(jax.grad(dense, (0, 1, 2)))(x, s, 3.0)
    for found, expected in zip(streamed, written_out, strict=True):
        assert relative_error(found, expected) < 1e-10


def test_ksd_tells_a_right_sample_from_a_wrong_one():
    x = np.random.default_rng(0).normal(size=(2000, 2)).astype(np.float32)
    assert ksd(x, -x) < 0.1 < 0.3 < ksd(1.5 * x, -1.5 * x)
    assert abs(ksd(x, -x, statistic="u")) < 0.01


def test_memory_does_not_grow_with_the_square():
    n = 20_000
    x = jax.ShapeDtypeStruct((n, 10), jnp.float32)

    def temporary(function, *arguments):
        compiled = jax.jit(function).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def discrepancy(x, s):
        return ksd(x, s, bandwidth=1.0)

    def difference(x, y):
        return mmd(x, y, bandwidth=1.0)

    assert temporary(discrepancy, x, x) < 100e6
    assert temporary(jax.grad(discrepancy), x, x) < 100e6
    assert temporary(difference, x, x) < 100e6
    assert temporary(lambda x: collapse_summary(x)[1:], x) < 100e6


def gram(x, y, h, kernel):
    u = np.sum((x[:, None] - y[None]) ** 2, axis=-1) / (2 * h)
    return np.exp(-u) if kernel == "rbf" else (1 + 2 * u) ** -0.5


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
@pytest.mark.parametrize("n, m, d", [(5, 9, 2), (300, 40, 12)])
def test_mmd_is_the_definition(x64, kernel, n, m, d):
    x, y = draw(n, d, dtype=np.float64)[0], draw(m, d, seed=1, offset=0.3, dtype=np.float64)[0]
    both = np.concatenate([x, y])
    pairs = np.sqrt(np.sum((both[:, None] - both[None]) ** 2, axis=-1))
    h = np.median(pairs[np.triu_indices(n + m, 1)]) ** 2
    xx, yy, xy = gram(x, x, h, kernel), gram(y, y, h, kernel), gram(x, y, h, kernel)
    biased = xx.mean() + yy.mean() - 2 * xy.mean()
    unbiased = (xx.sum() - n) / (n * n - n) + (yy.sum() - m) / (m * m - m) - 2 * xy.mean()
    np.testing.assert_allclose(mmd(x, y, kernel=kernel), np.sqrt(biased), rtol=1e-9)
    np.testing.assert_allclose(mmd(x, y, kernel=kernel, statistic="u"), unbiased, rtol=1e-8)
    assert mmd(x, x, kernel=kernel) < 1e-7


def greedy(matrix, m):
    matrix = np.asarray(matrix)
    objective, chosen = np.diagonal(matrix) / 2, []
    for _ in range(m):
        chosen.append(int(np.argmin(objective)))
        objective = objective + matrix[chosen[-1]]
    return chosen


@pytest.mark.parametrize("kernel", ["imq", "rbf"])
@pytest.mark.parametrize("n, d, m", [(1, 2, 3), (30, 2, 40), (60, 12, 10)])
def test_thinning_is_the_greedy_choice(x64, kernel, n, d, m):
    x, s = draw(n, d, dtype=np.float64)
    chosen = stein_thinning(x, s, m, bandwidth=2.0, kernel=kernel)
    assert chosen.tolist() == greedy(dense_stein(x, s, 2.0, PROFILES[kernel]), m)
    assert chosen.dtype == jnp.int32
    median = float(median_bandwidth(x, rule="median_distance"))
    if n > 1:
        expected = greedy(dense_stein(x, s, median, PROFILES[kernel]), m)
        assert stein_thinning(x, s, m, kernel=kernel).tolist() == expected


def cosine(x, y):
    return jnp.sum(jnp.cos(x - y)) + 0.5 * (x @ y) ** 2


@pytest.mark.parametrize(
    "kernel",
    [
        "linear",
        LinearKernel(2.0, centred=False),
        cosine,
        IMQ + 0.3 * LinearKernel() + 0.2 * FunctionKernel(cosine),
    ],
)
def test_thinning_takes_the_kernels_of_ksd(x64, kernel):
    x, s = map(jnp.asarray, draw(30, 2, offset=0.5, dtype=np.float64))

    def linear(origin, offset):
        return stein_matrix(lambda a, b: offset + (a - origin) @ (b - origin), x, s)

    if kernel == "linear":
        matrix = linear(x.mean(0), 1.0)
    elif isinstance(kernel, LinearKernel):
        matrix = linear(0.0, 2.0)
    elif kernel is cosine:
        matrix = stein_matrix(cosine, x, s)
    else:
        matrix = dense_stein(x, s, 2.0, PROFILES["imq"]) + 0.3 * linear(x.mean(0), 1.0)
        matrix += 0.2 * stein_matrix(cosine, x, s)
    chosen = stein_thinning(x, s, 40, bandwidth=2.0, kernel=kernel)
    assert chosen.tolist() == greedy(matrix, 40)
    assert np.isclose(jnp.mean(matrix), ksd(x, s, bandwidth=2.0, kernel=kernel) ** 2)


def test_thinning_is_that_of_stein_thinning(x64):
    package = pytest.importorskip("stein_thinning.thinning")
    x, s = draw(200, 3, dtype=np.float64)
    expected = package.thin(x, s, 25, standardize=False)
    assert stein_thinning(x, s, 25, bandwidth=1.0).tolist() == expected.tolist()


@pytest.mark.parametrize("d", [3, 12])
@pytest.mark.parametrize("kind", ["outlier", "clusters"])
def test_far_particles_keep_their_digits(d, kind):
    y, _ = draw(150, d)
    x, h = y.copy(), np.float32(2 * d)
    if kind == "outlier":
        x[0] += 1e6
    else:
        x[:70] += 3e3
    s = -y

    def figures(dtype):
        a, b, c = (jnp.asarray(v, dtype) for v in (x, s, y))
        scalars = [ksd(a, b, bandwidth=h, kernel=kernel) for kernel in ("imq", "rbf")]
        scalars += [mmd(a, c, bandwidth=h) ** 2, ksd(a, b, bandwidth=np.full(d, h, dtype))]
        gradient = jax.grad(lambda s: ksd(a, s, bandwidth=h))(b)
        return np.array(scalars, np.float64), wide(gradient), stein_thinning(a, b, 6, bandwidth=h)

    found = figures(np.float32)
    with jax.enable_x64(True):
        expected = figures(np.float64)
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5, atol=1e-6)
    assert relative_error(found[1], expected[1]) < 1e-4
    np.testing.assert_array_equal(found[2], expected[2])


def test_coincident_particles_have_figures():
    """More than half of the pairs at distance 0: the median distance is no length scale."""
    x = np.full((6, 2), 0.5, np.float32)
    x[0] = 2.0
    assert np.isfinite(ksd(x, -x)) and ksd(x, -x) == ksd(x, -x, bandwidth=1.0)
    np.testing.assert_allclose(jax.jit(ksd)(x, -x), ksd(x, -x), rtol=1e-6)
    assert mmd(x, x[1:]) == mmd(x, x[1:], bandwidth=1.0) > 0
    np.testing.assert_array_equal(stein_thinning(x, -x, 2), stein_thinning(x, -x, 2, bandwidth=1.0))
    with pytest.raises(ValueError, match="bandwidth must be positive"):
        ksd(x, -x, bandwidth=0.0)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_collapse_of_tiny_and_huge_particles(scale):
    x = np.array([[0.0, 0.0], [3.0, 4.0], [30.0, 40.0]], np.float32) * np.float32(scale)
    found = collapse_summary(x)
    np.testing.assert_allclose(found.smallest_distance, 5 * scale, rtol=1e-6)
    assert found.coincident_fraction == 0


def test_thinned_particles_are_better_than_as_many_first_ones():
    x, _ = draw(500, 2)
    chosen = stein_thinning(x, -x, 20)
    assert ksd(x[chosen], -x[chosen], bandwidth=1.0) < ksd(x[:20], -x[:20], bandwidth=1.0) / 2


def test_collapse_summary():
    x = wide(draw(100, 12)[0]).astype(np.float32)
    x[3] = x[7]
    x[20] = x[21] + np.float32(1e-3)
    summary = collapse_summary(x, np.full(12, 4.0))
    np.testing.assert_allclose(summary.variance_ratio, np.var(x, axis=0) / 4, rtol=1e-5)
    assert summary.smallest_distance == 0
    assert summary.coincident_fraction == np.float32(0.02)
    assert collapse_summary(x, tolerance=0.01).coincident_fraction == np.float32(0.04)
    assert collapse_summary(x).variance_ratio is None
    covariance = np.diag(np.arange(1.0, 13.0))
    np.testing.assert_allclose(
        collapse_summary(x, covariance).variance_ratio, np.var(x, axis=0) / np.arange(1, 13), 1e-5
    )
    apart = collapse_summary(np.array([[0.0, 0.0], [3.0, 4.0], [30.0, 0.0]], np.float32))
    assert apart.smallest_distance == 5 and apart.coincident_fraction == 0
    alone = collapse_summary(np.ones((1, 2), np.float32))
    assert np.isinf(alone.smallest_distance) and alone.coincident_fraction == 0


def test_laplace_variance_of_a_gaussian_is_its_variance(x64):
    a = np.random.default_rng(0).normal(size=(4, 4))
    covariance = a @ a.T + np.eye(4)
    precision = np.linalg.inv(covariance)
    found = laplace_variance(lambda x: -0.5 * x @ precision @ x, np.zeros(4))
    np.testing.assert_allclose(found, np.diagonal(covariance), rtol=1e-10)


X = np.zeros((4, 2), np.float32)


@pytest.mark.parametrize(
    "error, message, call",
    [
        (ValueError, r"particles must have shape \(N, d\)", lambda: ksd(X[0], X)),
        (ValueError, r"scores must have the shape of particles, \(4, 2\)", lambda: ksd(X, X[:3])),
        (ValueError, 'statistic must be "v" or "u", got', lambda: ksd(X, X, statistic="w")),
        (ValueError, "at least two particles, got 1", lambda: ksd(X[:1], X[:1], statistic="u")),
        (ValueError, "kernel must be", lambda: ksd(X, X, kernel="gauss")),
        (TypeError, "kernel must be .* got float", lambda: ksd(X, X, kernel=1.0)),
        (ValueError, r"y must have shape \(M, 2\) like x", lambda: mmd(X, X[:, :1])),
        (ValueError, "at least two y, got 1", lambda: mmd(X, X[:1], statistic="u")),
        (ValueError, "m must be a whole number", lambda: stein_thinning(X, X, 0)),
        (
            ValueError,
            "kernel must be .* got 'laplace'",
            lambda: stein_thinning(X, X, 1, kernel="laplace"),
        ),
        (ValueError, "m must be a whole number", lambda: stein_thinning(X, X, 2.0)),
        (ValueError, "reference_variance must be", lambda: collapse_summary(X, np.ones(3))),
        (ValueError, "tolerance must be at least 0", lambda: collapse_summary(X, tolerance=-1)),
        (ValueError, r"mode must have shape \(d,\)", lambda: laplace_variance(jnp.sum, X)),
    ],
)
def test_errors_say_what_came_and_what_was_expected(error, message, call):
    with pytest.raises(error, match=message):
        call()
