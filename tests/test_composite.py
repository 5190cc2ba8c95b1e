"""Kernels that are not radial, and sums: against the definition of the direction, written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsvgd
from jsvgd.composite import FunctionKernel, LinearKernel, as_kernel
from jsvgd.diagnostics import ksd, ksd_contributions
from jsvgd.kernels import IMQ, RBF, KernelSum, RadialKernel
from tests.problems import draw, relative_error


def by_definition(k, x, s, y, repulsion=1.0):
    """1/N sum_j [ k(x_j, y) s_j + repulsion grad_{x_j} k(x_j, y) ], by loops of JAX."""

    def at(q):
        values = jax.vmap(lambda p: k(p, q))(x)
        gradients = jax.vmap(lambda p: jax.grad(k)(p, q))(x)
        return (values @ s + repulsion * gradients.sum(0)) / x.shape[0]

    return jax.jit(jax.vmap(at))(y)


def linear(m, offset=1.0):
    return lambda p, q: offset + (p - m) @ (q - m)


def rbf(h):
    return lambda p, q: jnp.exp(-jnp.sum((p - q) ** 2) / (2 * h))


@pytest.mark.parametrize(("n", "d"), [(1, 1), (1, 4), (7, 3), (3, 9), (40, 5)])
@pytest.mark.parametrize("repulsion", [1.0, -0.5])
def test_linear_kernel_is_the_definition(x64, n, d, repulsion):
    x, s = map(jnp.asarray, draw(n, d, offset=2.0, dtype=np.float64))
    phi = jsvgd.svgd_direction(x, s, 1.0, kernel="linear", repulsion=repulsion)
    expected = by_definition(linear(x.mean(0)), x, s, x, repulsion)
    assert relative_error(phi, expected) < 1e-13


def test_linear_kernel_about_the_origin_with_queries(x64):
    x, s = map(jnp.asarray, draw(11, 4, offset=1.0, dtype=np.float64))
    y = x[:3] + 0.3
    kernel = LinearKernel(offset=2.5, centred=False)
    phi = jsvgd.svgd_direction(x, s, 1.0, kernel=kernel, queries=y)
    expected = by_definition(linear(0.0, 2.5), x, s, y)
    assert relative_error(phi, expected) < 1e-13


def test_linear_kernel_forms_no_particle_by_particle_array():
    n, d = 50_000, 4

    def phi(x, s):
        return jsvgd.svgd_direction(x, s, 1.0, kernel="linear")

    shape = jax.ShapeDtypeStruct((n, d), jnp.float32)
    memory = jax.jit(phi).lower(shape, shape).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8 * n * d * 4


@pytest.mark.parametrize("implementation", [None, "xla", "dense", "interpret"])
def test_sum_is_the_sum_of_its_terms(implementation):
    x, s = draw(37, 5)
    kernel = RBF + 0.1 * LinearKernel() + 2 * IMQ
    options = {"implementation": implementation, "precision": "highest"}
    phi = jsvgd.svgd_direction(x, s, 3.0, kernel=kernel, **options)
    terms = [jsvgd.svgd_direction(x, s, 3.0, kernel=k, **options) for k in ("rbf", "linear", "imq")]
    assert relative_error(phi, terms[0] + 0.1 * terms[1] + 2 * terms[2]) < 1e-6


def test_function_kernel_is_the_definition_and_the_rbf_kernel(x64):
    x, s = map(jnp.asarray, draw(23, 3, dtype=np.float64))
    y = x[:5] - 0.2
    phi = jsvgd.svgd_direction(x, s, 1.0, kernel=rbf(1.7), queries=y)
    assert relative_error(phi, by_definition(rbf(1.7), x, s, y)) < 1e-13
    assert relative_error(phi, jsvgd.svgd_direction(x, s, 1.7, queries=y)) < 1e-12


def test_function_kernel_memory_grows_with_n():
    n, d = 20_000, 2

    def phi(x, s):
        return jsvgd.svgd_direction(x, s, 1.0, kernel=rbf(1.0))

    shape = jax.ShapeDtypeStruct((n, d), jnp.float32)
    memory = jax.jit(phi).lower(shape, shape).compile().memory_analysis()
    assert memory.temp_size_in_bytes < n * n / 4  # an N x N array would take 16 times that


def test_asymmetric_function_is_differentiated_in_its_first_argument(x64):
    x, s = map(jnp.asarray, draw(6, 2, dtype=np.float64))

    def lopsided(p, q):
        return jnp.sum(p**3 * q)

    phi = jsvgd.svgd_direction(x, s, 1.0, kernel=lopsided)
    assert relative_error(phi, by_definition(lopsided, x, s, x)) < 1e-13


@pytest.mark.parametrize("kernel", ["linear", RBF + 0.3 * LinearKernel(), rbf(1.2)])
def test_gradients_are_those_of_the_definition(x64, kernel):
    x, s = map(jnp.asarray, draw(9, 3, dtype=np.float64))
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=x.shape))

    def written_out(x, s, h):
        if kernel == "linear":
            return by_definition(linear(x.mean(0)), x, s, x)
        if isinstance(kernel, KernelSum):
            radial = by_definition(rbf(h), x, s, x)
            return radial + 0.3 * written_out_linear(x, s)
        return by_definition(kernel, x, s, x)

    def written_out_linear(x, s):
        # grad_{x_j} leaves m alone: the mean moves with particles only from outside.
        m = x.mean(0)
        return s.mean(0) + (x - m) @ ((x - m).T @ s) / len(x) + (x - m)

    def ours(x, s, h):
        return jsvgd.svgd_direction(x, s, h, kernel=kernel)

    def gradients(function):
        value = lambda *a: jnp.sum(cotangent * function(*a))
        return jax.jit(jax.grad(value, (0, 1, 2)))(x, s, 2.0)

    for mine, expected in zip(gradients(ours), gradients(written_out), strict=True):
        assert relative_error(mine, expected) < 1e-10


def test_weights_may_be_traced_differentiated_and_mapped():
    x, s = draw(20, 3)

    @jax.jit
    def energy(kernel):
        return jnp.sum(jsvgd.svgd_direction(x, s, 2.0, kernel=kernel) ** 2)

    kernel = RBF + 0.5 * LinearKernel()
    gradient = jax.grad(energy)(kernel)
    step = 1e-2
    up, down = (energy(RBF + w * LinearKernel()) for w in (0.5 + step, 0.5 - step))
    assert abs(gradient.weights[1] - (up - down) / (2 * step)) < 1e-2 * abs(gradient.weights[1])
    mapped = jax.vmap(lambda w: energy(RBF + w * LinearKernel()))(jnp.array([0.0, 0.5]))
    assert np.allclose(mapped[1], energy(kernel), rtol=1e-5)
    assert np.allclose(mapped[0], energy(RBF * 1.0), rtol=1e-5)


@pytest.mark.parametrize(
    "weight", [jnp.float32(0.5), jnp.array(0.5), np.float32(0.5), np.array(0.5), 0.5]
)
def test_weights_that_are_arrays_become_numbers(weight):
    """So that a kernel can be a static argument of a compiled function: jsvgd.fit makes it one."""
    for kernel in (weight * RBF, RBF * weight, KernelSum((weight,), (RBF,))):
        assert kernel == 0.5 * RBF and hash(kernel) == hash(0.5 * RBF)
        assert type(kernel.weights[0]) is float
    x, s = draw(5, 2)
    static = jax.jit(
        lambda kernel: jsvgd.svgd_direction(x, s, 1.0, kernel=kernel), static_argnums=0
    )
    half = jsvgd.svgd_direction(x, s, 1.0) / 2
    assert relative_error(static(weight * RBF), half) < 1e-6


def test_weights_that_are_no_scalars_are_for_vmap_alone():
    x, s = draw(5, 2)
    kernel = KernelSum((np.array([0.5, 2.0]), jnp.array([0.0, 1.0])), (RBF, LinearKernel()))

    def phi(kernel):
        return jsvgd.svgd_direction(x, s, 1.0, kernel=kernel)

    mapped = jax.vmap(phi)(kernel)
    assert relative_error(mapped[1], phi(2 * RBF + LinearKernel())) < 1e-6
    with pytest.raises(ValueError, match=r"must be scalars, got one of shape \(2,\)"):
        phi(kernel)


def test_chains_under_vmap():
    x, s = draw(24, 3)
    kernel = RBF + 0.1 * LinearKernel()
    chains = [a.reshape(2, 12, 3) for a in (x, s)]
    mapped = jax.vmap(lambda x, s: jsvgd.svgd_direction(x, s, 2.0, kernel=kernel))(*chains)
    alone = jsvgd.svgd_direction(chains[0][1], chains[1][1], 2.0, kernel=kernel)
    assert relative_error(mapped[1], alone) < 1e-6


def test_widened_is_the_kernel_at_a_wider_bandwidth():
    x, s = draw(15, 2)
    wide = jsvgd.svgd_direction(x, s, 0.5, kernel=RBF.widened(4.0))
    assert relative_error(wide, jsvgd.svgd_direction(x, s, 2.0)) < 1e-6
    assert RBF.widened(4.0) is RBF.widened(4)


def test_linear_kernel_alone_fits_two_moments():
    """Its fixed points have the moments of the Gaussian target, with only d + 2 particles."""
    d = 3
    rng = np.random.default_rng(0)
    a = rng.normal(size=(d, d))
    covariance, mean = a @ a.T + np.eye(d), rng.normal(size=d)
    precision = np.linalg.inv(covariance)
    with jax.enable_x64(True):  # to the last digits of the moments
        x = jnp.asarray(rng.normal(size=(d + 2, d)))
        step = jax.jit(
            lambda x: jsvgd.svgd_update(x, -(x - mean) @ precision, 1.0, 0.05, kernel="linear")
        )
        for _ in range(3000):
            x = step(x)
    x = np.asarray(x)
    assert np.allclose(np.mean(x, axis=0), mean, atol=1e-6)
    assert np.allclose(np.cov(x.T, bias=True), covariance, rtol=1e-5)


def test_update_and_low_precision():
    x, s = draw(10, 2)
    kernel = RBF + LinearKernel()
    phi = jsvgd.svgd_direction(x, s, 1.0, kernel=kernel)
    assert np.allclose(jsvgd.svgd_update(x, s, 1.0, 0.1, kernel=kernel), x + 0.1 * phi, atol=1e-6)
    low = jsvgd.svgd_direction(jnp.bfloat16(x), jnp.bfloat16(s), 1.0, kernel=kernel)
    assert low.dtype == jnp.bfloat16
    assert relative_error(low.astype(jnp.float32), phi) < 3e-2


def stein_matrix(k, x, s):
    """k_p by automatic differentiation of any k."""

    def pair(p, sp, q, sq):
        trace = jnp.trace(jax.jacfwd(jax.grad(k), 1)(p, q))
        return sp @ sq * k(p, q) + sp @ jax.grad(k, 1)(p, q) + sq @ jax.grad(k)(p, q) + trace

    row = jax.vmap(pair, (None, None, 0, 0))
    return jax.jit(jax.vmap(row, (0, 0, None, None)))(x, s, x, s)


@pytest.mark.parametrize(("n", "d"), [(9, 3), (3, 5)])
@pytest.mark.parametrize("statistic", ["v", "u"])
def test_stein_discrepancy_of_kernels_that_add_up(x64, n, d, statistic):
    x, s = map(jnp.asarray, draw(n, d, dtype=np.float64))
    matrices = {
        "linear": stein_matrix(linear(x.mean(0)), x, s),
        "rbf": stein_matrix(rbf(1.7), x, s),
    }
    matrices["sum"] = matrices["rbf"] + 0.1 * matrices["linear"]
    kernels = {"linear": "linear", "rbf": rbf(1.7), "sum": RBF + 0.1 * LinearKernel()}
    for name, kernel in kernels.items():
        value = ksd(x, s, bandwidth=1.7, kernel=kernel, statistic=statistic)
        expected = jnp.sqrt(jnp.mean(matrices[name]))
        if statistic == "u":
            expected = (jnp.sum(matrices[name]) - jnp.trace(matrices[name])) / (n * (n - 1))
        assert np.allclose(value, expected, rtol=1e-10), name
        rows = ksd_contributions(x, s, bandwidth=1.7, kernel=kernel, statistic=statistic)
        sums = jnp.sum(matrices[name], axis=1)
        if statistic == "u":
            assert np.allclose(rows, (sums - jnp.diagonal(matrices[name])) / (n - 1)), name
        else:
            assert np.allclose(rows, sums / n), name


def test_linear_discrepancy_is_stein_identity_of_two_moments(x64):
    x, s = map(jnp.asarray, draw(20, 3, dtype=np.float64))
    moments = (x - x.mean(0)).T @ s / 20 + np.eye(3)
    expected = jnp.sum(s.mean(0) ** 2) + jnp.sum(moments**2)
    assert np.allclose(ksd(x, s, kernel="linear") ** 2, expected)


def test_a_profile_of_ones_own_in_a_sum():
    student = RadialKernel("student", lambda u: 1 / (1 + u))
    x, s = draw(12, 2)
    phi = jsvgd.svgd_direction(x, s, 1.5, kernel=0.5 * student + LinearKernel())
    alone = jsvgd.svgd_direction(x, s, 1.5, kernel=student)
    other = jsvgd.svgd_direction(x, s, 1.5, kernel="linear")
    assert relative_error(phi, 0.5 * alone + other) < 1e-6


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: as_kernel("laplace"), ValueError, "'laplace'"),
        (lambda: as_kernel(3), TypeError, "int"),
        (lambda: LinearKernel(offset=0.0), ValueError, "offset"),
        (lambda: RBF * -1.0, ValueError, "at least 0"),
        (lambda: jnp.float32(-1.0) * RBF, ValueError, "at least 0, got -1.0"),
        (lambda: KernelSum((None,), (RBF,)), TypeError, "weights .* real numbers, got None"),
        (lambda: KernelSum((1j,), (RBF,)), TypeError, "weights .* real numbers, got 1j"),
        (lambda: RBF.widened(0), ValueError, "factor"),
        (lambda: KernelSum((1.0,), (RBF, IMQ)), ValueError, "one weight a kernel"),
        (lambda: KernelSum((1.0,), (RBF + IMQ,)), TypeError, "single kernels"),
        (lambda: RBF + 1.0, TypeError, "unsupported operand"),
        (lambda: RBF * IMQ, TypeError, "unsupported operand"),
        (lambda: FunctionKernel(2), TypeError, "function"),
        (
            lambda: jsvgd.svgd_direction(*draw(3, 2), 1.0, kernel="linear", precision="low"),
            ValueError,
            "precision",
        ),
        (
            lambda: jsvgd.svgd_direction(*draw(3, 2), -1.0, kernel=RBF + LinearKernel()),
            ValueError,
            "bandwidth must be positive",
        ),
    ],
)
def test_errors_name_what_came(make, error, message):
    with pytest.raises(error, match=message):
        make()
