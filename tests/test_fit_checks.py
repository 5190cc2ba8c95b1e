"""What the diagnostics of ``fit`` flag, and what they leave alone."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsvgd.fit import fit
from jsvgd.fit_checks import split_check, target_check
from jsvgd.fit_result import judge
from tests.targets import KEY, badly_scaled, normal, quiet, standard


def said(result, words):
    return any(words in warning for warning in result.warnings)


def funnel(x):
    d = x.shape[0] - 1
    return -(x[0] ** 2) / 18 - 0.5 * jnp.sum(x[1:] ** 2) * jnp.exp(-x[0]) - d * x[0] / 2


def two_modes(x):
    return jnp.logaddexp(standard(x - 8), standard(x + 8))


def test_a_good_fit_has_small_figures_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fit(KEY, standard, normal(100, 3))
    d = result.diagnostics
    assert result.good and result.warnings == ()
    assert d.num_steps == 1000 and d.retries == 0 and d.lost == 0
    assert d.mean_residual < 0.02 and d.spread_residual < 0.03 and d.sd_drift < 0.02
    assert d.ksd_ratio < 0.2 and 0.6 < d.split < 0.8 and d.other_basin == 0
    assert "good" in str(result) and "median" in str(result)


def test_too_few_particles_are_flagged():
    result = quiet(standard, normal(10, 12), num_steps=100)
    assert said(result, "10 particles for 12 dimensions")
    assert not result.good
    assert said(result, "standard deviations cannot be relied on")


def test_modes_that_the_particles_left_are_flagged():
    result = quiet(two_modes, normal(100, 3, scale=10.0))
    assert said(result, "basin of another mode")
    assert not result.good


def test_two_far_groups_of_particles_are_flagged():
    """Kept apart without whitening and without the linear kernel."""
    start = jnp.concatenate([normal(70, 2, offset=8.0), normal(30, 2, seed=1, offset=-8.0)])
    options = {"linear_weight": 0.0, "preconditioner": None, "bandwidth": 1.0, "widening": 1.0}
    result = quiet(two_modes, start, num_steps=200, **options)
    assert said(result, "30% in the smaller one")


def test_a_funnel_not_yet_converged_is_flagged():
    assert said(quiet(funnel, normal(100, 10)), "not converged")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"step_size": 30.0, "max_move": 1e9}, "blew up"), ({"step_size": 20.0}, "turn back")],
)
def test_a_step_size_too_large_is_flagged_and_survived(options, words):
    result = quiet(
        lambda u: -0.5 * u[0] ** 2 - 2 * (u[1] - u[0] ** 2 + 1) ** 2, normal(100, 2), **options
    )
    assert said(result, words)
    assert np.all(np.isfinite(result.unconstrained))


def test_too_few_steps_fail():
    result = quiet(lambda x: 1e4 * standard(x - 100), normal(100, 3), num_steps=50)
    assert result.verdict.startswith("failed")
    assert said(result, "Stein's identity does not hold")


def test_coincident_starts_are_said_and_parted():
    start = normal(100, 3).at[:, 1].set(2.0)
    result = quiet(standard, start)
    assert said(result, "one value in 1 of 3 dimensions")
    assert np.allclose(result.summary.sd, 1, atol=0.02)


def test_one_particle_is_the_mode():
    result = quiet(badly_scaled, normal(1, 3))
    assert said(result, "finds the mode")
    assert result.summary.sd.shape == (3,)


def test_domain_without_gradient_is_an_error_or_a_failure():
    def walled(x):
        return jnp.where(jnp.all(x > 0), standard(x), jnp.nan)

    with pytest.raises(ValueError, match="no finite gradient at any of the 30 particles"):
        quiet(walled, normal(30, 2, offset=-9.0))
    result = quiet(walled, jnp.abs(normal(30, 2)), num_steps=200)
    assert np.all(np.isfinite(result.unconstrained))
    assert not result.good


def test_particles_that_leave_the_domain_in_turn_fail_with_finite_numbers():
    """Each block of steps may lose only what the run may lose in all."""

    def exponential(x):
        return jnp.where(jnp.all(x > 0), -jnp.sum(x), -jnp.inf)

    start = jnp.abs(normal(60, 2))
    result = quiet(exponential, start)
    assert result.verdict.startswith("failed") and said(result, "supports=")
    assert result.diagnostics.lost <= 6
    assert np.all(np.isfinite(result.unconstrained)) and np.all(result.summary.sd < 100)


def test_particles_beyond_the_largest_float_are_said():
    pytest.importorskip("numpyro")
    start = jnp.exp(normal(60, 1))
    result = quiet(
        lambda x: jnp.sum(-0.5 * (jnp.log(x) / 60) ** 2 - jnp.log(x)), start, supports="positive"
    )
    assert np.isnan(result.summary.sd[0])
    assert result.verdict.startswith("failed")
    assert said(
        result, f"{result.diagnostics.overflowed} of 60 particles are not finite in the units"
    )


def test_figures_of_independent_draws():
    x = normal(2000, 4)
    check = target_check(x, -x)
    assert 0.3 < check.ksd_ratio < 1.5  # one on average
    assert np.max(np.abs(check.mean_residuals)) < 0.1
    wrong = target_check(x + 1.0, -(x + 1.0))
    assert wrong.ksd_ratio > 50
    assert np.allclose(wrong.mean_residuals, -1, atol=0.1)


def test_residuals_do_not_grow_with_correlation():
    covariance = np.array([[1, 0.999], [0.999, 1]])
    x = normal(2000, 2) @ np.float32(np.linalg.cholesky(covariance)).T
    check = target_check(x, -x @ np.float32(np.linalg.inv(covariance)))
    assert np.max(np.abs(check.mean_residuals)) < 0.1
    assert np.max(np.abs(check.spread_residuals)) < 0.1
    # Twice the same parameter cannot be whitened: its own scale remains.
    twice = target_check(jnp.repeat(x[:, :1], 2, axis=1), -jnp.repeat(x[:, :1], 2, axis=1) / 2)
    assert np.allclose(twice.spread_residuals, 0.5, atol=0.05)


def test_a_rotated_gaussian_of_condition_1e8_does_not_fail():
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    inverse = jnp.float32((rotation / np.array([1e-4, 1e-2, 1])).T)
    result = quiet(lambda x: standard(inverse @ x), normal(100, 3))
    assert not result.verdict.startswith("failed"), str(result)


@pytest.mark.parametrize("n", [60, 500])
@pytest.mark.parametrize(
    "draw",
    [
        np.random.Generator.uniform,
        np.random.Generator.exponential,
        np.random.Generator.laplace,
        functools.partial(np.random.Generator.standard_t, df=3),
    ],
    ids=["uniform", "exponential", "laplace", "t3"],
)
def test_one_group_is_not_called_two(draw, n, good):
    for seed in range(20):
        split = split_check(draw(np.random.default_rng(seed), size=(n, 2)))
        figures = good._replace(
            split=split.explained, split_share=split.smaller_share, num_particles=n
        )
        assert judge(figures)[1] == (), seed


def test_modes_six_sds_apart_are_called_two():
    def near_modes(x):
        return jnp.logaddexp(standard(x - 3), standard(x + 3))

    for seed, share in ((0, 0.49), (3, 0.07)):
        result = quiet(near_modes, jax.random.normal(jax.random.key(seed), (100, 2)))
        assert said(result, "two groups far apart"), seed
        assert abs(result.diagnostics.split_share - share) < 0.02


def test_split_of_known_distributions():
    rng = np.random.default_rng(0)
    assert abs(split_check(rng.normal(size=(20_000, 1))).explained - 2 / np.pi) < 0.01
    assert abs(split_check(rng.uniform(size=(20_000, 1))).explained - 0.75) < 0.01
    halves = np.where(np.arange(1000)[:, None] < 200, -5, 5) + rng.normal(size=(1000, 3))
    split = split_check(halves @ np.linalg.qr(rng.normal(size=(3, 3)))[0])
    assert split.explained > 0.9 and split.smaller_share == 0.2


@pytest.fixture(scope="module")
def good():
    """Figures of a fit that nothing speaks against."""
    return quiet(standard, normal(100, 3)).diagnostics


def test_every_figure_has_its_warning(good):
    assert judge(good)[1] == ()
    for change, words in [
        ({"ksd_ratio": 9.0}, "kernel Stein discrepancy is 9.0 times"),
        ({"lost": 3}, "3 of 100 particles"),
        ({"mean_residual": 0.5}, "off by 0.50"),
        ({"sd_drift": 0.5}, "changed by 65%"),
    ]:
        verdict, found = judge(good._replace(**change))
        assert not verdict.startswith("good") and len(found) == 1 and words in found[0]
    assert judge(good, complete=False)[0].startswith("failed")


def test_steps_that_turn_back_are_flagged_while_they_move(good):
    turning = good._replace(turning=-0.9, last_direction=0.1)
    assert any("turn back" in warning for warning in judge(turning)[1])
    assert judge(turning._replace(last_direction=1e-4))[1] == ()


def test_no_figure_that_is_nan_is_good(good):
    names = [name for name, value in good._asdict().items() if isinstance(value, float)]
    assert len(names) == 12
    for name in names:
        verdict, found = judge(good._replace(**{name: float("nan")}))
        assert not verdict.startswith("good") and len(found) == 1, name


def test_a_run_stopped_before_half_is_too_short_to_judge():
    def heavy(x):
        return -jnp.sum(jnp.log1p(x**2))

    result = quiet(heavy, normal(60, 2), stop_after=20, num_steps=40)
    assert np.isnan(result.diagnostics.sd_drift)
    assert said(result, "too short to judge: it stopped after 20 steps") and not result.good
    result = quiet(heavy, normal(60, 2), stop_after=21, num_steps=40)
    assert result.diagnostics.sd_drift > 0 and not said(result, "too short")
