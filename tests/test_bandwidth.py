"""Bandwidth rules against the libraries they come from, and every form a bandwidth may take."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jsvgd.bandwidth import (
    RULES,
    BandwidthRule,
    BandwidthSchedule,
    check_bandwidth_choice,
    median_bandwidth,
    resolve_bandwidth,
)
from tests.problems import relative_error, wide

SIZES = [(2, 3), (3, 1), (7, 4), (20, 10)]


def cloud(n, d, dtype=np.float32):
    return np.random.default_rng([n, d]).normal(size=(n, d)).astype(dtype)


def dense(x):
    """The reference: lower median of all N^2, clamped, over max(log N, 1)."""
    n = x.shape[0]
    squared = jnp.sum((x[:, None] - x[None]) ** 2, axis=-1)
    median = jnp.sort(squared.reshape(-1))[(n * n - 1) // 2]
    return jnp.maximum(median, 1e-5) / max(math.log(n), 1.0)


@pytest.mark.parametrize("n, d", [(1, 2), *SIZES, (150, 12)])
def test_default_rule_and_its_derivatives_are_the_dense_formula(x64, n, d):
    x = jnp.asarray(cloud(n, d, np.float64))
    dx = jnp.asarray(np.random.default_rng(1).normal(size=x.shape))

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(function, x, dx):
        gradient, second = jax.jvp(jax.grad(function), (x,), (dx,))
        return function(x), gradient, second

    h, gradient, second = derivatives(median_bandwidth, x, dx)
    expected = derivatives(dense, x, dx)
    np.testing.assert_allclose(h, expected[0], rtol=1e-13)
    np.testing.assert_allclose(gradient, expected[1], atol=1e-12)
    np.testing.assert_allclose(second, expected[2], atol=1e-12)


def test_lower_median_counts_the_diagonal():
    # torch.median takes the lower of two middle elements: of [0 0 | 4 4] it gives 0.
    assert median_bandwidth(np.array([[0.0], [2.0]], np.float32)) == np.float32(1e-5)
    # [0 0 0 | 1 1 4 4 9 9]: the fifth of nine.
    x = np.array([[0.0], [1.0], [3.0]], np.float32)
    assert median_bandwidth(x) == np.float32(np.float32(1) / np.float32(math.log(3)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n, d", SIZES)
def test_streamed_rules_are_the_sorted_ones(x64, rule, n, d):
    x = cloud(n, d, np.float64)

    @functools.partial(jax.jit, static_argnums=1)
    def value_and_slope(x, implementation):
        h, pullback = jax.vjp(
            lambda x: median_bandwidth(x, rule=rule, implementation=implementation), x
        )
        return h, *pullback(jnp.ones_like(h))

    streamed, slope = value_and_slope(x, "xla")
    expected = value_and_slope(x, "dense")
    assert streamed.shape == ((d,) if rule == "pyro" else ())
    np.testing.assert_allclose(streamed, expected[0], rtol=1e-12)
    np.testing.assert_allclose(slope, expected[1], atol=1e-12)


@pytest.mark.parametrize("n, d", SIZES)
def test_blackjax(x64, n, d):
    svgd = pytest.importorskip("blackjax.vi.svgd")
    x = jnp.asarray(cloud(n, d, np.float64))
    b = svgd.median_heuristic({"length_scale": 1.0}, x)["length_scale"]
    np.testing.assert_allclose(2 * median_bandwidth(x, rule="blackjax"), b, rtol=1e-12)
    h = median_bandwidth(x, rule="blackjax")
    np.testing.assert_allclose(
        svgd.rbf_kernel(x[0], x[1], length_scale=b),
        np.exp(-np.sum((x[0] - x[1]) ** 2) / (2 * h)),
        rtol=1e-12,
    )


@pytest.mark.parametrize("n, d", [(1, 2), *SIZES])
def test_numpyro(x64, n, d):
    stein_util = pytest.importorskip("numpyro.contrib.einstein.stein_util")
    kernels = pytest.importorskip("numpyro.contrib.einstein.stein_kernels")
    x = jnp.asarray(cloud(n, d, np.float64))
    b = stein_util.median_bandwidth(x, kernels.RBFKernel().bandwidth_factor)
    # Its distances on the diagonal are not quite zero: sqrt of the rounding of |x|^2.
    np.testing.assert_allclose(2 * median_bandwidth(x, rule="numpyro"), b, rtol=1e-6)


@pytest.mark.parametrize("n, d", SIZES)
def test_msvgd(x64, n, d):
    try:
        import msvgd
    except (ImportError, SyntaxError) as error:  # its sources need Python 3.12
        pytest.skip(f"msvgd cannot be imported here: {error}")
    x = jnp.asarray(cloud(n, d, np.float64))
    for scaled in (x, x * 1e-5):  # and below its floor of 1e-6
        _, b = msvgd.MSVGD(lambda x: -jnp.sum(x**2)).pairwise_distance(scaled)
        np.testing.assert_allclose(2 * median_bandwidth(scaled, rule="msvgd"), b, rtol=1e-9)


def test_liu_and_wang_recorded(x64, reference_data):
    with open(reference_data / "svgd_reference" / "svgd_gaussian2d.json") as file:
        recorded = json.load(file)
    x = np.array(recorded["x0"])
    h = median_bandwidth(x, rule="liu")
    np.testing.assert_allclose(h, recorded["h_squared_in_exp_minus_d2_over_2h2"], rtol=1e-12)
    squared = np.sum((x[:, None] - x[None]) ** 2, axis=-1)
    np.testing.assert_allclose(np.exp(-squared / (2 * h)), recorded["K"], rtol=1e-11)


def full_matrix(x):
    return np.sum((x[:, None] - x[None]) ** 2, axis=-1)


def liu(x):
    return np.median(full_matrix(x)) / np.log(len(x) + 1)


def pyro(x):
    squared = (x[:, None] - x[None]) ** 2
    pairs = squared[np.triu_indices(len(x), 1)]
    lower = np.sort(pairs, axis=0)[(len(pairs) - 1) // 2]
    return lower / math.log(len(x) + 1)


def no_log(x):
    return max(np.median(full_matrix(x)), 1e-6)


def median_distance(x):
    return 2 * np.median(np.sqrt(full_matrix(x)[np.triu_indices(len(x), 1)])) ** 2


@pytest.mark.parametrize("n, d", SIZES)
@pytest.mark.parametrize("formula", [liu, pyro, no_log, median_distance])
def test_transcribed_formulas(x64, formula, n, d):
    x = cloud(n, d, np.float64)
    b = 2 * median_bandwidth(x, rule=formula.__name__)
    np.testing.assert_allclose(b, formula(x), rtol=1e-12)


@pytest.mark.parametrize("quantile", [0.0, 0.1, 0.31, 0.9, 1.0])
def test_other_quantiles(x64, quantile):
    x = cloud(9, 3, np.float64)
    for diagonal in (True, False):
        entries = full_matrix(x)
        entries = entries.ravel() if diagonal else entries[np.triu_indices(9, 1)]
        for interpolation in ("lower", "linear"):
            rule = BandwidthRule(quantile=quantile, diagonal=diagonal, interpolation=interpolation)
            expected = np.quantile(entries, quantile, method=interpolation)
            np.testing.assert_allclose(2 * median_bandwidth(x, rule=rule), expected, rtol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_one_particle_is_finite_and_constant(rule):
    x = cloud(1, 3)
    h = median_bandwidth(x, rule=rule)
    assert (np.asarray(h) > 0).all()
    gradient = jax.grad(lambda x: jnp.sum(median_bandwidth(x, rule=rule)))(x)
    np.testing.assert_array_equal(gradient, np.zeros((1, 3)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n", [1, 5, 150])
def test_particles_that_are_not_finite_give_nan(rule, n):
    x = cloud(n, 10)
    x[n // 2] = np.inf
    assert np.isnan(median_bandwidth(x, rule=rule)).all()


@pytest.mark.parametrize("n, d", [(10, 3), (300, 20)])
def test_coincident_particles(n, d):
    x = np.full((n, d), 0.1, np.float32)
    for rule, expected in [("median", 1e-5 / math.log(n)), ("liu", 0), ("blackjax", 0)]:
        h, slope = jax.jit(jax.value_and_grad(functools.partial(median_bandwidth, rule=rule)))(x)
        np.testing.assert_allclose(h, expected, rtol=1e-6)
        np.testing.assert_array_equal(slope, np.zeros_like(x))


def test_stop_gradient():
    x = cloud(20, 2)
    assert np.abs(jax.grad(median_bandwidth)(x)).max() > 0
    stopped = jax.grad(lambda x: median_bandwidth(x, stop_gradient=True))(x)
    np.testing.assert_array_equal(stopped, np.zeros_like(x))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_float32(dtype):
    x = jnp.asarray(cloud(40, 3)).astype(dtype)
    h = median_bandwidth(x)
    assert h.dtype == jnp.float32
    assert h == median_bandwidth(x.astype(jnp.float32))
    gradient = jax.grad(median_bandwidth)(x)
    assert gradient.dtype == dtype


def test_transformations_compose():
    x = jnp.stack([cloud(30, 2) * scale for scale in (0.5, 1.0, 2.0)])
    value_and_gradient = jax.value_and_grad(median_bandwidth)
    alone = [value_and_gradient(row) for row in x]
    values, gradients = jax.jit(jax.vmap(value_and_gradient))(x)
    np.testing.assert_array_equal(values, [value for value, _ in alone])
    np.testing.assert_allclose(gradients, [gradient for _, gradient in alone], rtol=1e-5)
    of_vmap = jax.grad(lambda x: jnp.sum(jax.vmap(median_bandwidth)(x)))(x)
    np.testing.assert_allclose(of_vmap, gradients, rtol=1e-5)

    def step(x, _):
        h, gradient = value_and_gradient(x)
        return x - 0.1 * gradient, h

    _, history = jax.lax.scan(step, x[1], length=3)
    assert history[0] == alone[1][0] and (np.diff(history) < 0).all()


@pytest.mark.parametrize("rule", ["median", "liu", "blackjax"])
def test_the_same_bits_with_jit_vmap_and_neither(rule):
    x = np.random.default_rng(0).normal(size=(40, 20, 3)).astype(np.float32)
    h = functools.partial(median_bandwidth, rule=rule)
    alone = np.array([h(one) for one in x])
    np.testing.assert_array_equal(jax.vmap(h)(x), alone)
    np.testing.assert_array_equal(jax.jit(jax.vmap(h))(x), alone)
    np.testing.assert_array_equal(np.array([jax.jit(h)(one) for one in x]), alone)


@pytest.mark.parametrize("d", [3, 12])
@pytest.mark.parametrize("distance", [1e4, 1e10])
def test_gradient_beside_an_outlier(d, distance):
    x = np.random.default_rng(0).normal(size=(60, d)).astype(np.float32)
    x[5] += distance
    gradients = [
        jax.grad(functools.partial(median_bandwidth, rule="no_log", implementation=name))(x)
        for name in ("xla", "dense")
    ]
    assert relative_error(*gradients) < 1e-6


def test_a_sampled_median_estimates_the_exact_one():
    x = cloud(500, 5)
    rule = BandwidthRule(multiplier=2.0, log="n", sample=4000)
    sampled = jax.jit(lambda x: median_bandwidth(x, rule=rule))(x)
    assert sampled == jax.jit(lambda x: median_bandwidth(x, rule=rule))(x)
    exact = median_bandwidth(x)
    assert sampled != exact
    np.testing.assert_allclose(sampled, exact, rtol=0.05)
    assert np.count_nonzero(jax.grad(lambda x: median_bandwidth(x, rule=rule))(x)) == 10


def test_every_form_resolves():
    x = cloud(20, 3)
    median = median_bandwidth(x)
    assert resolve_bandwidth(0.7, x) == np.float32(0.7)
    assert resolve_bandwidth(2, x) == 2.0
    np.testing.assert_array_equal(resolve_bandwidth(np.array([1.0, 2.0, 3.0]), x), [1, 2, 3])
    assert resolve_bandwidth("median", x) == median
    assert resolve_bandwidth(RULES["liu"], x) == median_bandwidth(x, rule="liu")
    np.testing.assert_allclose(resolve_bandwidth(lambda x: jnp.var(x), x), x.var(), rtol=1e-6)
    decay = optax.exponential_decay(8.0, 1, 0.5)
    for step in range(3):
        factor = 8.0 / 2**step
        assert resolve_bandwidth(BandwidthSchedule(decay), x, step) == factor * median
        assert resolve_bandwidth(BandwidthSchedule(decay, None), x, jnp.int32(step)) == factor
        nested = BandwidthSchedule(decay, lambda x: 0.5)
        assert jax.jit(lambda x, i, n=nested: resolve_bandwidth(n, x, i))(x, step) == factor / 2
    assert resolve_bandwidth(0.7, x.astype(np.float16)).dtype == jnp.float32


def test_float64_numbers_keep_their_digits(x64):
    assert resolve_bandwidth(0.1, cloud(3, 1, np.float64)) == 0.1
    assert resolve_bandwidth("liu", wide(cloud(3, 1))).dtype == jnp.float64


@pytest.mark.parametrize(
    "error, message, call",
    [
        (
            ValueError,
            r"particles must have shape \(N, d\), got \(5,\)",
            lambda x: median_bandwidth(x[0]),
        ),
        (
            TypeError,
            "particles must have a floating dtype, got int",
            lambda x: median_bandwidth(x.astype(int)),
        ),
        (
            ValueError,
            "rule must be one of .*'median'.* got 'mediann'",
            lambda x: median_bandwidth(x, rule="mediann"),
        ),
        (
            TypeError,
            "rule must be one of .* got float",
            lambda x: median_bandwidth(x, rule=1.0),
        ),
        (
            ValueError,
            "implementation must be one of .* got 'cuda'",
            lambda x: median_bandwidth(x, implementation="cuda"),
        ),
        (
            ValueError,
            "bandwidth must be positive and finite, got -1",
            lambda x: check_bandwidth_choice(-1),
        ),
        (
            ValueError,
            "bandwidth must be positive and finite, got nan",
            lambda x: resolve_bandwidth(float("nan"), x),
        ),
        (
            TypeError,
            "bandwidth must be the name of a rule.* got bool",
            lambda x: check_bandwidth_choice(True),
        ),
        (
            TypeError,
            "bandwidth must be the name of a rule.* got NoneType",
            lambda x: resolve_bandwidth(None, x),
        ),
        (
            ValueError,
            r"bandwidth must be a scalar or have shape \(5,\), got \(4,\)",
            lambda x: resolve_bandwidth(np.ones(4), x),
        ),
        (
            ValueError,
            r"bandwidth must be a scalar or have shape \(5,\), got \(6, 5\)",
            lambda x: resolve_bandwidth(lambda x: x, x),
        ),
        (
            TypeError,
            "schedule must be a function from the step.* got float",
            lambda x: BandwidthSchedule(1.0),
        ),
        (
            ValueError,
            "rule must be one of .* got 'x'",
            lambda x: BandwidthSchedule(abs, "x"),
        ),
        (
            ValueError,
            "log must be .* got 'N'",
            lambda x: BandwidthRule(log="N"),
        ),
        (
            ValueError,
            "interpolation must be .* got 'upper'",
            lambda x: BandwidthRule(interpolation="upper"),
        ),
        (
            ValueError,
            "quantile must be between 0 and 1, got 50",
            lambda x: BandwidthRule(quantile=50),
        ),
        (
            ValueError,
            "multiplier must be positive, got 0",
            lambda x: BandwidthRule(multiplier=0),
        ),
        (
            ValueError,
            "floor must be at least 0, got -1",
            lambda x: BandwidthRule(floor=-1),
        ),
        (
            ValueError,
            "sample must be a whole number >= 1 or None, got 0.5",
            lambda x: BandwidthRule(sample=0.5),
        ),
    ],
)
def test_errors_say_what_came_and_what_was_expected(error, message, call):
    with pytest.raises(error, match=message):
        call(cloud(6, 5))
