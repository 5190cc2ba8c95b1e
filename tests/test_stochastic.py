"""Stochastic SVGD: the covariance of its noise, and stationary laws on Gaussians."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jsvgd
from jsvgd.composite import LinearKernel, as_kernel, divergence_remainder
from jsvgd.kernels import IMQ, RBF
from jsvgd.sampler import svgd
from jsvgd.stochastic import kernel_noise, stochastic_svgd

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2)), jnp.float32)
SQUARED = np.sum((np.asarray(X)[:, None] - np.asarray(X)[None]) ** 2, axis=-1)
CENTRED = np.asarray(X - X.mean(0))
MATRICES = {
    "rbf": np.exp(-SQUARED / 3),
    "imq": (1 + SQUARED / 1.5) ** -0.5,
    "linear": 1 + CENTRED @ CENTRED.T,
}


def noise_moments(draws, **options):
    keys = jax.random.split(jax.random.key(1), draws)
    noise = np.asarray(jax.vmap(lambda key: kernel_noise(key, X, 1.5, **options))(keys))
    return noise.mean(0), np.einsum("tic,tjd->cdij", noise, noise) / draws


@pytest.mark.parametrize("num_features", [1, 20, None])
@pytest.mark.parametrize("kernel", ["rbf", "imq", "linear"])
def test_covariance_of_the_noise_is_the_kernel(kernel, num_features):
    """Exactly, whatever the number of features: 6 standard errors of 40000 draws."""
    mean, covariance = noise_moments(40_000, kernel=kernel, num_features=num_features)
    matrix = MATRICES[kernel]
    error = 6 * 2 * matrix.max() / 200 * (1.5 if num_features == 1 else 1)
    assert np.allclose(mean, 0, atol=error)
    assert np.allclose(covariance[0, 0], matrix, atol=error)
    assert np.allclose(covariance[1, 1], matrix, atol=error)
    assert np.allclose(covariance[0, 1], 0, atol=error)


def test_covariance_of_sums_profiles_and_functions():
    kernel = 0.5 * RBF + 2 * LinearKernel() + RBF.widened(2.0)
    expected = 0.5 * MATRICES["rbf"] + 2 * MATRICES["linear"] + np.exp(-SQUARED / 6)
    assert np.allclose(
        noise_moments(40_000, kernel=kernel)[1][1, 1], expected, atol=0.06 * expected.max()
    )
    function = noise_moments(40_000, kernel=lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2) / 3))
    assert np.allclose(function[1][0, 0], MATRICES["rbf"], atol=0.06)
    wide = jnp.array([1.5, 1e6])
    noise = jax.vmap(lambda key: kernel_noise(key, X, wide))(
        jax.random.split(jax.random.key(2), 40_000)
    )
    one_dimension = np.exp(-((CENTRED[:, None, 0] - CENTRED[None, :, 0]) ** 2) / 3)
    assert np.allclose(np.cov(np.asarray(noise)[:, :, 0].T), one_dimension, atol=0.06)


def pooled(sampler, start, num_steps, skip, key=0):
    _, history = jsvgd.run(
        jax.random.key(key), sampler, sampler.init(start), num_steps, every=5, keep_particles=True
    )
    return np.asarray(history.particles)[skip // 5 :]


@pytest.mark.parametrize(
    ("kernel", "num_features"),
    [("rbf", 100), ("rbf", None), ("imq", 10), (RBF + 0.3 * LinearKernel(), 20)],
)
def test_stationary_moments_of_a_gaussian_with_few_particles(kernel, num_features):
    """Mean (1, -2), variances (1, 4): SVGD alone with five particles has far smaller ones."""
    mean, variance = jnp.array([1.0, -2.0]), jnp.array([1.0, 4.0])

    def logdensity(x):
        return -0.5 * jnp.sum((x - mean) ** 2 / variance)

    start = jnp.asarray(np.random.default_rng(3).normal(size=(5, 2)), jnp.float32)
    options = {"kernel": kernel, "bandwidth": 1.5}
    sampler = stochastic_svgd(logdensity, 0.1, num_features=num_features, **options)
    draws = pooled(sampler, start, 40_000, 2_000)
    assert np.allclose(draws.mean((0, 1)), mean, atol=0.15)
    assert np.allclose(draws.var((0, 1)) / variance, 1, atol=0.12)
    if kernel == "rbf":
        alone = pooled(svgd(logdensity, optax.sgd(0.1), **options), start, 2_000, 1_900)
        assert np.all(alone.var((0, 1)) / variance < 0.8)


def rbf(x, y):
    return jnp.exp(-jnp.sum((x - y) ** 2) / 3)


def tilted(x, y):
    """Positive definite, and no function of x - y."""
    return 0.5 + (1 + x @ y) * jnp.exp(-jnp.sum((x - y) ** 2) / 2)


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize(
    ("kernel", "function"),
    [
        (LinearKernel(2.0, centred=False), lambda x, y: 2 + x @ y),
        (tilted, tilted),
        (RBF, rbf),
        (0.5 * LinearKernel(centred=False) + RBF, lambda x, y: 0.5 * (1 + x @ y) + rbf(x, y)),
    ],
)
def test_divergence_is_that_of_the_whole_matrix(x64, kernel, function, moving):
    """sum_j d/dx_j of K, every dependence on x_j differentiated, against the direction without scores."""
    x = jnp.asarray(X, jnp.float64)
    n, d = x.shape

    def matrix(x):
        z = x - x.mean(0) if moving else x
        return jax.vmap(lambda a: jax.vmap(lambda b: function(a, b))(z))(z)

    expected = jnp.einsum("ijjc->ic", jax.jacfwd(matrix)(x)) / n
    z = x - x.mean(0) if moving else x
    phi = jsvgd.svgd_direction(z, jnp.zeros((n, d)), 1.5, kernel=kernel)
    rest = divergence_remainder(z, kernel=as_kernel(kernel), moving=moving)
    assert np.allclose(phi + rest / n, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("kernel", "shape", "preconditioner"),
    [
        (LinearKernel(centred=False), (2, 1), None),
        (RBF + LinearKernel(centred=False), (3, 2), None),
        (LinearKernel(), (2, 1), None),
        (tilted, (2, 1), None),
        (tilted, (3, 1), np.array([2.0])),
    ],
)
def test_a_gaussian_stays_what_it_is_for_kernels_that_are_not_of_differences(
    kernel, shape, preconditioner
):
    """4000 chains that begin in N(0, 1): half the variance is lost without the second derivative."""
    sampler = stochastic_svgd(
        lambda x: -0.5 * x @ x,
        0.02,
        kernel=kernel,
        bandwidth=1.0,
        num_features=20,
        preconditioner=preconditioner,
    )

    def chain(key, x):
        def step(state, key):
            return sampler.step(key, state)[0], None

        return jax.lax.scan(step, sampler.init(x), jax.random.split(key, 400))[0].particles

    keys = jax.random.split(jax.random.key(1), 4000)
    start = jax.random.normal(jax.random.key(0), (4000, *shape))
    draws = np.asarray(jax.jit(jax.vmap(chain))(keys, start))
    assert np.allclose(draws.mean((0, 1)), 0, atol=0.06)
    assert np.allclose(draws.var((0, 1)), 1, atol=0.07)


def test_particles_are_independent_in_the_stationary_law():
    start = jnp.asarray(np.random.default_rng(3).normal(size=(3, 3)), jnp.float32)
    sampler = stochastic_svgd(lambda x: -0.5 * x @ x, 0.1, bandwidth=1.0)
    draws = pooled(sampler, start, 40_000, 2_000)
    for dimension in range(3):
        assert np.allclose(np.cov(draws[:, :, dimension].T), np.eye(3), atol=0.15)


def test_preconditioner_temperature_and_schedule():
    """A matrix preconditioner, T = 4 and a decaying step: sds (2e-3, 2e3)."""
    scales = jnp.array([1e-3, 1e3])
    start = jnp.asarray(np.random.default_rng(3).normal(size=(5, 2)), jnp.float32) * scales
    sampler = stochastic_svgd(
        lambda x: -0.5 * jnp.sum((x / scales) ** 2),
        optax.linear_schedule(0.3, 0.1, 1000),
        bandwidth=4.0,
        preconditioner=np.asarray(scales) ** 2,
        temperature=4.0,
        score_batch_size=2,
    )
    draws = pooled(sampler, start, 40_000, 2_000)
    assert np.allclose(draws.std((0, 1)) / scales, 2, atol=0.2)


def test_noise_is_that_of_the_key_and_vanishes_with_the_step():
    sampler = stochastic_svgd(lambda x: -0.5 * x @ x, 1e-12, bandwidth=1.0)
    state = sampler.init(X)
    moved = sampler.step(jax.random.key(0), state)[0].particles
    assert np.allclose(moved, X, atol=1e-5)
    sampler = stochastic_svgd(lambda x: -0.5 * x @ x, 0.1, bandwidth=1.0)
    steps = [sampler.step(jax.random.key(i), state)[0].particles for i in (0, 0, 1)]
    assert np.array_equal(steps[0], steps[1]) and not np.array_equal(steps[0], steps[2])


def test_noise_of_features_forms_no_particle_by_particle_array():
    n, d = 50_000, 2
    shape = jax.ShapeDtypeStruct((n, d), jnp.float32)
    noise = jax.jit(lambda x: kernel_noise(jax.random.key(0), x, 1.0, num_features=20))
    memory = noise.lower(shape).compile().memory_analysis()
    assert memory.temp_size_in_bytes < n * 20 * 4 * 8


def test_errors_name_what_came():
    with pytest.raises(ValueError, match="step_size must be positive, got 0"):
        stochastic_svgd(lambda x: x.sum(), 0.0)
    with pytest.raises(ValueError, match="num_features must be at least 1, got 0"):
        stochastic_svgd(lambda x: x.sum(), 0.1, num_features=0)
    with pytest.raises(TypeError, match="int"):
        stochastic_svgd(3, 0.1)
    with pytest.raises(ValueError, match="'laplace'"):
        stochastic_svgd(lambda x: x.sum(), 0.1, kernel="laplace")


def test_imq_and_rbf_are_told_apart():
    noise = [kernel_noise(jax.random.key(0), X, 1.5, kernel=k) for k in (RBF, IMQ)]
    assert not np.allclose(*noise)
