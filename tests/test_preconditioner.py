"""Preconditioned SVGD: affine equivariance, hard covariances, schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jsvgd
from jsvgd.bandwidth import BandwidthSchedule
from jsvgd.composite import LinearKernel
from jsvgd.kernels import RBF
from jsvgd.preconditioner import (
    Preconditioner,
    as_preconditioner,
    covariance_factor,
    diagonal_factor,
    from_whitened,
    to_whitened,
)
from jsvgd.sampler import svgd
from jsvgd.transform import scale_by_svgd
from tests.problems import draw, relative_error

KERNEL = RBF + 0.1 * LinearKernel()


def trajectory(logdensity, x, num_steps=30, step_size=0.1, bandwidth=2.0, **options):
    sampler = svgd(logdensity, optax.sgd(step_size), bandwidth=bandwidth, **options)

    def step(state, _):
        state, _ = sampler.step(jax.random.key(0), state)
        return state, state.particles

    return jax.lax.scan(step, sampler.init(x), None, num_steps)[1]


def banana(x):
    return -0.5 * x[0] ** 2 - 2 * (x[1] - x[0] ** 2 + 1) ** 2 - 0.5 * jnp.sum(x[2:] ** 2)


@pytest.mark.parametrize("refresh_every", [1, 5, None])
def test_affine_change_of_variables_changes_nothing_but_coordinates(x64, refresh_every):
    d, n = 4, 30
    rng = np.random.default_rng(0)
    a = rng.normal(size=(d, d)) * 10.0 ** rng.uniform(-3, 3, size=(d, 1))
    b = rng.normal(size=d) * 100
    x, _ = draw(n, d, dtype=np.float64)
    inverse = jnp.linalg.inv(a)
    options = {"kernel": KERNEL, "preconditioner": "covariance", "refresh_every": refresh_every}
    plain = trajectory(banana, jnp.asarray(x), **options)
    changed = trajectory(lambda y: banana(inverse @ (y - b)), jnp.asarray(x @ a.T + b), **options)
    # The Cholesky factors differ by a rotation, which neither rbf nor linear kernel sees.
    back = (changed - b) @ inverse.T
    assert relative_error(back, plain) < 1e-7
    assert relative_error(plain[-1], x) > 0.1  # it moved


def test_without_a_preconditioner_scales_do_change_the_path(x64):
    x, _ = draw(30, 2, dtype=np.float64)
    plain = trajectory(banana, jnp.asarray(x))
    changed = trajectory(lambda y: banana(y / 3.0), jnp.asarray(3 * x)) / 3.0
    assert relative_error(changed, plain) > 1e-2


def test_diagonal_preconditioner_is_invariant_to_units(x64):
    x, _ = draw(30, 3, dtype=np.float64)
    units = jnp.array([1e-4, 1.0, 1e5])
    options = {"preconditioner": "diagonal"}
    plain = trajectory(banana, jnp.asarray(x), **options)
    changed = trajectory(lambda y: banana(y / units), jnp.asarray(x) * units, **options)
    assert relative_error(changed / units, plain) < 1e-9


def test_matrix_preconditioner_is_the_change_of_variables(x64):
    """phi_x = L phi_z with z = L^-1 x: the definition, by the plain op."""
    x, s = draw(20, 3, dtype=np.float64)
    a = np.random.default_rng(1).normal(size=(3, 3))
    matrix = a @ a.T + np.eye(3)
    transform = scale_by_svgd(preconditioner=matrix, bandwidth=1.5)
    updates, state = transform.update(-jnp.asarray(s), transform.init(x), jnp.asarray(x))
    factor = np.linalg.cholesky(matrix)
    phi = jsvgd.svgd_direction(x @ np.linalg.inv(factor).T, s @ factor, 1.5)
    assert relative_error(-updates, phi @ factor.T) < 1e-12
    assert relative_error(state.factor, factor) < 1e-12
    variances = scale_by_svgd(preconditioner=np.array([4.0, 1.0, 9.0]), bandwidth=1.5)
    as_matrix = scale_by_svgd(preconditioner=np.diag([4.0, 1.0, 9.0]), bandwidth=1.5)
    results = [t.update(-s, t.init(x), jnp.asarray(x))[0] for t in (variances, as_matrix)]
    assert relative_error(*results) < 1e-12


def test_function_preconditioner_and_its_refresh():
    seen = []

    def variances(particles):
        jax.debug.callback(lambda: seen.append(1))
        return jnp.var(particles, axis=0)

    x, _ = draw(10, 2)
    trajectory(banana, jnp.asarray(x), num_steps=9, preconditioner=variances, refresh_every=4)
    jax.effects_barrier()
    assert len(seen) == 3  # steps 0, 4 and 8


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_factor_is_the_square_root_of_the_covariance(dtype):
    with jax.enable_x64(dtype == np.float64):
        x, _ = draw(50, 6, dtype=dtype, offset=3.0)
        x = x @ np.random.default_rng(2).normal(size=(6, 6)).astype(dtype)
        factor = np.asarray(covariance_factor(jnp.asarray(x)), np.float64)
    assert factor.dtype == np.float64 and np.allclose(factor, np.tril(factor))
    expected = np.cov(np.asarray(x, np.float64).T)
    assert relative_error(factor @ factor.T, expected) < (2e-5 if dtype == np.float32 else 1e-12)


def whitened_spectrum(x):
    factor = covariance_factor(jnp.asarray(x))
    z = np.asarray(to_whitened(factor, jnp.asarray(x - x.mean(0))), np.float64)
    return np.linalg.eigvalsh(np.cov(z.T)), factor


def test_condition_1e12_in_raw_units_in_float32():
    """Units from 1e-6 to 1e6, so variances from 1e-12 to 1e12, with strong correlations inside."""
    rng = np.random.default_rng(3)
    mix = np.linalg.qr(rng.normal(size=(5, 5)))[0] * np.array([1.0, 1, 1, 0.1, 0.01])
    x = rng.normal(size=(100, 5)) @ mix.T * np.array([1e-6, 1e-3, 1, 1e3, 1e6])
    spectrum, _ = whitened_spectrum(x.astype(np.float32))
    assert np.allclose(spectrum, 1, atol=2e-2)


def test_a_direction_a_thousand_times_narrower_in_float32():
    """Rotated, so no unit is to blame: variances 1 and 1e-6 of a pair of dimensions."""
    rng = np.random.default_rng(4)
    z = rng.normal(size=(200, 2)) * np.array([1.0, 1e-3])
    turn = np.array([[np.cos(0.7), -np.sin(0.7)], [np.sin(0.7), np.cos(0.7)]])
    spectrum, _ = whitened_spectrum((z @ turn.T).astype(np.float32))
    assert np.allclose(spectrum, 1, atol=2e-2)


@pytest.mark.parametrize(
    "degenerate",
    ["constant", "duplicate", "offset", "one particle", "few", "huge", "coincident"],
)
def test_degenerate_particles_give_a_finite_invertible_factor(degenerate):
    x, _ = draw(20, 4)
    x = {
        "constant": lambda: np.where(np.arange(4) == 1, np.float32(0.1), x),
        "duplicate": lambda: x[:, [0, 1, 2, 2]],
        "offset": lambda: x * np.float32(1e-3) + np.float32(1000),
        "one particle": lambda: x[:1],
        "few": lambda: x[:5],
        "huge": lambda: x * np.float32(1e30),
        "coincident": lambda: np.repeat(x[:1], 20, axis=0),
    }[degenerate]()
    factor = np.asarray(covariance_factor(jnp.asarray(x)), np.float64)
    pivots = factor if factor.ndim == 1 else np.diagonal(factor)
    assert np.all(np.isfinite(factor)) and np.all(pivots > 0)
    if degenerate in ("constant", "coincident"):
        assert 0.5 < pivots[1] < 1.5
    if degenerate == "few":
        assert np.allclose(factor, np.std(x.astype(np.float64), axis=0, ddof=1), rtol=1e-4)


def test_too_few_particles_are_said():
    x, _ = draw(5, 4)
    with pytest.warns(UserWarning, match="5 particles cannot whiten 4 dimensions"):
        scale_by_svgd(preconditioner="covariance").init(x)


def test_a_factor_that_is_not_finite_is_not_taken():
    x, _ = draw(20, 2)
    preconditioner = as_preconditioner("diagonal", 1)
    previous = jnp.array([2.0, 3.0])
    bad = jnp.asarray(x).at[0, 0].set(jnp.inf)
    assert np.array_equal(preconditioner.refreshed(bad, jnp.int32(7), previous), previous)
    assert not np.array_equal(preconditioner.refreshed(x, jnp.int32(7), previous), previous)


@pytest.mark.parametrize("d", [3, 37])
def test_whitening_and_back(d):
    x, _ = draw(60, d)
    for factor in (covariance_factor(jnp.asarray(x)), diagonal_factor(jnp.asarray(x)), None):
        assert relative_error(from_whitened(factor, to_whitened(factor, x)), x) < 3e-6


def test_chains_under_vmap_have_their_own_factors():
    x = jnp.stack([draw(12, 2, seed=i)[0] * (i + 1) / 3 for i in range(3)])
    options = {"preconditioner": "covariance", "num_steps": 7, "step_size": 0.02}
    together = jax.vmap(lambda x: trajectory(banana, x, **options))(x)
    assert relative_error(together[2], trajectory(banana, x[2], **options)) < 1e-4


def test_temperature_one_is_vanilla_to_the_bit():
    x, _ = draw(20, 2)
    plain = trajectory(banana, jnp.asarray(x))
    for temperature in (1.0, optax.constant_schedule(1.0)):
        assert np.array_equal(trajectory(banana, jnp.asarray(x), temperature=temperature), plain)


def test_temperature_flattens_the_target():
    """At T = 4 a Gaussian's stationary sd doubles: the preconditioned kernel scales along."""
    x, _ = draw(30, 1)

    def stationary(temperature):
        path = trajectory(
            lambda x: -0.5 * x @ x,
            jnp.asarray(x),
            400,
            0.2,
            temperature=temperature,
            preconditioner="diagonal",
        )
        return np.std(path[-1])

    assert abs(stationary(4.0) / stationary(1.0) - 2) < 0.02
    cooling = stationary(optax.linear_schedule(4.0, 1.0, 100))
    assert abs(cooling / stationary(1.0) - 1) < 0.02


def test_schedules_of_bandwidth_and_step_size():
    x, s = draw(20, 2)
    widening = BandwidthSchedule(optax.linear_schedule(4.0, 1.0, 2), rule=lambda x: 1.5)
    transform = scale_by_svgd(bandwidth=widening)
    state, h = transform.init(x), []
    for _ in range(3):
        _, state = transform.update(-s, state, jnp.asarray(x))
        h.append(float(state.bandwidth))
    assert np.allclose(np.array(h) / h[-1], [4, 2.5, 1])
    frozen = trajectory(banana, jnp.asarray(x), 5, optax.piecewise_constant_schedule(0.1, {3: 0.0}))
    assert np.array_equal(frozen[4], frozen[2]) and not np.array_equal(frozen[2], frozen[1])


@pytest.mark.parametrize(
    ("preconditioner", "error", "message"),
    [
        ("full", ValueError, "'full'"),
        (3.0, TypeError, "float"),
        (np.ones((2, 3)), ValueError, r"\(2, 3\)"),
        (np.array([[1.0, 2.0], [0.0, 1.0]]), ValueError, "symmetric"),
        (np.array([[1.0, 2.0], [2.0, 1.0]]), ValueError, "positive definite"),
        (np.array([1.0, -1.0]), ValueError, "positive definite"),
    ],
)
def test_errors_name_what_came(preconditioner, error, message):
    with pytest.raises(error, match=message):
        scale_by_svgd(preconditioner=preconditioner)


def test_errors_of_shape_period_and_temperature():
    with pytest.raises(ValueError, match=r"shape \(4,\) or \(4, 4\), got \(3, 3\)"):
        scale_by_svgd(preconditioner=np.eye(3)).init(draw(9, 4)[0])
    with pytest.raises(ValueError, match="refresh_every"):
        Preconditioner(diagonal_factor, 0)
    with pytest.raises(ValueError, match="temperature must be positive"):
        scale_by_svgd(temperature=0.0)
    with pytest.raises(ValueError, match="temperature must be a scalar"):
        scale_by_svgd(temperature=np.ones(2))
