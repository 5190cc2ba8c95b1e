"""What the diagnostics of ``fit`` flag, and what they leave alone."""

import warnings

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
    with pytest.warns(UserWarning, match="10 particles for 12 dimensions"):
        result = fit(KEY, standard, normal(10, 12), num_steps=100)
    assert not result.good
    assert result.summary.sd.mean() < 0.9  # what the warning says


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


def test_figures_of_independent_draws():
    x = normal(2000, 4)
    check = target_check(x, -x)
    assert 0.3 < check.ksd_ratio < 1.5  # one on average
    assert np.max(np.abs(check.mean_residuals)) < 0.1
    wrong = target_check(x + 1.0, -(x + 1.0))
    assert wrong.ksd_ratio > 50
    assert np.allclose(wrong.mean_residuals, -1, atol=0.1)


def test_split_of_known_distributions():
    rng = np.random.default_rng(0)
    assert abs(split_check(rng.normal(size=(20_000, 1))).explained - 2 / np.pi) < 0.01
    assert abs(split_check(rng.uniform(size=(20_000, 1))).explained - 0.75) < 0.01
    halves = np.where(np.arange(1000)[:, None] < 200, -5, 5) + rng.normal(size=(1000, 3))
    split = split_check(halves @ np.linalg.qr(rng.normal(size=(3, 3)))[0])
    assert split.explained > 0.9 and split.smaller_share == 0.2


def test_every_figure_has_its_warning():
    good = quiet(standard, normal(100, 3)).diagnostics
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
