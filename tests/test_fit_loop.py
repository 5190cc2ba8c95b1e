"""The compiled loop of ``fit``: what it keeps, what it undoes, what it compiles, how it goes on."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsvgd import fit_loop
from jsvgd.fit_schedules import constant_then_linear
from jsvgd.preconditioner import Preconditioner, diagonal_factor
from tests.targets import normal, quiet, standard


def test_stopped_and_resumed_ends_bitwise_where_one_call_does():
    start = normal(30, 2)
    whole = quiet(badly_scaled_2d, start, num_steps=60)
    part = quiet(badly_scaled_2d, start, num_steps=60, stop_after=23)
    assert part.diagnostics.num_steps == 25  # whole blocks of five
    rest = quiet(badly_scaled_2d, start, num_steps=60, resume=part)
    assert np.array_equal(rest.unconstrained, whole.unconstrained)
    assert np.array_equal(rest.history.step, whole.history.step)
    assert np.array_equal(rest.history.residual, whole.history.residual)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"particles": normal(31, 2)},
            ValueError,
            r"resume .* shape \(30, 2\) .* got shape \(31, 2\)",
        ),
        (
            {"particles": normal(30, 3)},
            ValueError,
            r"resume .* shape \(30, 2\) .* got shape \(30, 3\)",
        ),
        ({"num_steps": 80}, ValueError, "resume is of a run with num_steps=40, got num_steps=80"),
        ({"refresh_every": 4}, ValueError, "resume .* 10 steps, .* refresh_every=4"),
        ({"preconditioner": None}, ValueError, r"resume .* factor of shape \(2, 2\) .* got None"),
        ({"resume": 3}, TypeError, "resume must be the FitResult of an earlier call, got int"),
    ],
)
def test_a_resume_of_another_run_is_an_error(change, error, message):
    options = {"particles": normal(30, 2), "num_steps": 40}
    part = quiet(standard, **options, stop_after=10)
    with pytest.raises(error, match=message):
        quiet(standard, **{**options, "resume": part, **change})


def badly_scaled_2d(x):
    return standard(x * jnp.array([1.0, 100.0]))


def test_the_period_of_a_preconditioner_counts():
    """Once, from the particles at the start; every tenth step; never less often than told in silence."""
    start = normal(30, 2, scale=3.0)

    def after(steps, period):
        options = {"preconditioner": Preconditioner(diagonal_factor, period), "stop_after": steps}
        return quiet(standard, start, num_steps=40, **options)

    assert np.array_equal(after(40, None).state.factor, diagonal_factor(start))
    assert np.array_equal(after(10, 10).state.factor, diagonal_factor(start))
    assert np.array_equal(after(15, 10).state.factor, diagonal_factor(after(10, 10).unconstrained))
    with pytest.raises(ValueError, match="refresh_every .* multiple of that of fit, 5, got 7"):
        after(10, 7)


def test_a_factor_that_is_not_finite_leaves_the_previous_one():
    start = normal(30, 2, scale=3.0)

    def fragile(x):
        return jnp.where(jnp.max(jnp.abs(x)) < jnp.max(jnp.abs(start)), jnp.nan, diagonal_factor(x))

    result = quiet(standard, start, num_steps=40, preconditioner=Preconditioner(fragile))
    assert result.diagnostics.num_steps == 40
    assert np.array_equal(result.state.factor, diagonal_factor(start))
    with pytest.raises(ValueError, match="preconditioner gives a factor that is not finite"):
        quiet(standard, start, preconditioner=Preconditioner(lambda x: fragile(x / 2)))


def of_variances(x):
    return jnp.diag(jnp.var(x, axis=0))


@pytest.mark.parametrize(
    "options",
    [
        dict,
        lambda: {"preconditioner": np.float32([[2.0, 0.5], [0.5, 1.0]])},
        lambda: {"preconditioner": of_variances},
        lambda: {"bandwidth": jnp.float32([1.0, 2.0])},
        lambda: {"bandwidth": 1.5},
    ],
    ids=["defaults", "matrix", "function", "bandwidths", "bandwidth"],
)
def test_the_same_call_compiles_nothing_new(options):
    start = normal(30, 2)
    quiet(standard, start, num_steps=20, **options())
    with jax.log_compiles(), warnings.catch_warnings():
        import logging

        records = []
        handler = logging.Handler()
        handler.emit = records.append
        logger = logging.getLogger("jax")
        logger.addHandler(handler)
        try:
            quiet(standard, start + 1, num_steps=40, step_size=0.3, linear_weight=0.2, **options())
        finally:
            logger.removeHandler(handler)
    compiled = [r.getMessage() for r in records if "Compiling" in r.getMessage()]
    assert not [
        message
        for message in compiled
        if any(name in message for name in ("advance", "start", "check"))
    ]


def test_no_particle_by_particle_array_at_large_n():
    from jsvgd.fit import BANDWIDTH
    from jsvgd.fit_schedules import constant_then_linear, geometric, temperature_schedule
    from jsvgd.kernels import RBF
    from jsvgd.preconditioner import as_preconditioner

    n, d = 16384, 4
    recipe = fit_loop.Recipe(
        logdensity=standard,
        kernel=RBF,
        bandwidth=BANDWIDTH,
        preconditioner=as_preconditioner("covariance"),
        block_length=5,
        step_size=constant_then_linear,
        widening=geometric,
        temperature=temperature_schedule(1.0),
        precision="high",
        implementation=None,
        score_batch_size=None,
    )
    numbers = fit_loop.Numbers(jnp.int32(10), *(jnp.float32(0.1),) * 4)
    state = jax.eval_shape(
        lambda x: fit_loop.start(recipe, x), jax.ShapeDtypeStruct((n, d), jnp.float32)
    )
    stop = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = fit_loop.advance.lower(recipe, numbers, state, stop).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < n * n / 2


# --- the guard ----------------------------------------------------------------------------------------


def test_no_block_raises_the_residual_hugely():
    """All its numbers are finite and no particle is lost, yet it is undone: what follows could not be."""

    def quartic(x):
        return -jnp.sum(x**4)

    options = {"step_size": 2.0, "max_move": 1e9, "refresh_every": 1, "num_steps": 300}
    result = quiet(quartic, normal(50, 2, scale=3.0), **options)
    assert result.diagnostics.retries > 0 and result.diagnostics.num_steps == 300
    assert np.allclose(result.summary.sd, 0.58137, rtol=0.03)  # (Gamma(3/4) / Gamma(1/4)) ** 0.5
    residuals = result.history.residual
    assert np.all(residuals[1:] <= 1.01 * np.maximum(10 * residuals[:-1], 30))


def test_the_step_factor_recovers():
    options = {"step_size": 30.0, "max_move": 1e9, "num_steps": 200}
    factors = quiet(
        lambda u: -0.5 * u[0] ** 2 - 2 * (u[1] - u[0] ** 2 + 1) ** 2, normal(100, 2), **options
    ).history.step_factor
    ratios = factors[1:] / factors[:-1]
    assert np.any(ratios == 0.5) and np.any(ratios == 1.25)
    assert factors.max() <= 1


def test_the_step_decays_over_the_second_half():
    fractions = np.array([0.0, 0.49, 0.75, 0.9, 1.0])
    assert np.allclose(constant_then_linear(fractions, 0, 2.0), [2.0, 2.0, 1.0, 0.4, 0.02])
    start = normal(30, 2, scale=3.0)

    def end(step_size):
        return quiet(standard, start, num_steps=40, step_size=step_size).unconstrained

    default = end(0.5)
    assert np.allclose(
        default, end(lambda step: constant_then_linear(step / 40, step, 0.5)), atol=1e-5
    )
    assert not np.allclose(default, end(lambda step: 0.5 + 0 * step), atol=1e-3)


def test_scores_whose_squares_overflow_still_lead_home():
    start = normal(30, 2)
    result = quiet(lambda x: 1e30 * standard(x - 30), start, num_steps=200)
    assert result.diagnostics.retries == 0
    assert np.all(np.abs(result.summary.mean - 30) < 1)


# --- progress -----------------------------------------------------------------------------------------


class Bar:
    """Stands in for tqdm's."""

    def __init__(self, total, initial, unit):
        self.total, self.steps, self.closed, self.residuals = total, initial, 0, []

    def update(self, steps):
        self.steps += steps

    def set_postfix(self, residual, refresh):
        self.residuals.append(float(residual))

    def close(self):
        self.closed += 1


@pytest.fixture
def bars(monkeypatch):
    made = []

    def make(**options):
        made.append(Bar(**options))
        return made[-1]

    monkeypatch.setattr("tqdm.auto.tqdm", make)
    return made


def test_the_bar_counts_steps(bars):
    start = normal(30, 2)
    part = quiet(standard, start, num_steps=240, stop_after=120, progress=True)
    quiet(standard, start, num_steps=240, resume=part, progress=True)
    first, second = bars
    assert (first.total, first.steps, second.total, second.steps) == (120, 120, 240, 240)
    assert first.closed == second.closed == 1
    assert np.isfinite(first.residuals).all() and first.residuals
    quiet(standard, start, num_steps=240)
    assert len(bars) == 2


def test_the_bar_is_closed_where_a_step_raises(bars, monkeypatch):
    def broken(*args):
        raise FloatingPointError("of the device")

    monkeypatch.setattr(fit_loop, "advance", broken)
    with pytest.raises(FloatingPointError):
        quiet(standard, normal(30, 2), progress=True)
    assert bars[0].closed == 1
