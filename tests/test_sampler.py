"""The sampler: steps, dtypes, batches, chains, and Liu and Wang's own code."""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jsvgd
import jsvgd.loop
from tests.problems import as_matrix, draw, network_particles, oracle, standard_normal

# --- svgd -----------------------------------------------------------------------------------------


def test_a_step_is_the_direction_times_the_step_size():
    particles = network_particles()
    sampler = jsvgd.svgd(standard_normal, optax.sgd(0.1), bandwidth=2.5)
    state, info = jax.jit(sampler.step)(jax.random.key(0), sampler.init(particles))
    x = as_matrix(particles)
    phi = oracle(x, -x, 2.5)
    np.testing.assert_allclose(as_matrix(state.particles), x + 0.1 * phi, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(info.bandwidth, 2.5)
    rms = lambda a: np.sqrt(np.mean(np.sum(a**2, axis=1)))
    np.testing.assert_allclose(info.direction_norm, rms(phi), rtol=1e-5)
    np.testing.assert_allclose(info.score_norm, rms(x), rtol=1e-5)
    assert int(info.num_nonfinite) == 0
    assert int(state.step) == 1


@pytest.mark.parametrize(
    "rule", ["median", "liu", "blackjax", "numpyro", "msvgd", "pyro", "no_log"]
)
def test_coincident_particles_stay_together_and_finite(rule):
    sampler = jsvgd.svgd(standard_normal, optax.sgd(0.1), bandwidth=rule)
    state = sampler.init(np.full((9, 3), 2.0, np.float32))
    state, _ = jsvgd.run(jax.random.key(0), sampler, state, 5)
    np.testing.assert_allclose(state.particles, np.full((9, 3), 2 * 0.9**5), rtol=1e-5)


def test_a_run_starts_where_nan_is_forbidden():
    with jax.debug_nans(True):
        sampler = jsvgd.svgd(standard_normal, optax.adam(0.1))
        state, _ = jsvgd.run(jax.random.key(0), sampler, sampler.init(network_particles()), 3)
    assert np.all(np.isfinite(as_matrix(state.particles)))


def test_non_finite_particles_are_counted():
    x, _ = draw(9, 3)
    sampler = jsvgd.svgd(lambda p: jnp.where(p[0] > 0, jnp.nan, -0.5) * (p @ p), optax.sgd(0.1))
    _, info = sampler.step(jax.random.key(0), sampler.init(x))
    assert int(info.num_nonfinite) == 9  # one NaN score reaches every particle


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_dtypes_stay(dtype):
    with jax.enable_x64(dtype == "float64"):
        particles = network_particles(dtype=jnp.dtype(dtype))
        sampler = jsvgd.svgd(standard_normal, optax.adam(1e-1))
        state = sampler.init(particles)
        state, _ = jsvgd.run(jax.random.key(0), sampler, state, 20)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state.particles)} == {dtype}
        before, after = as_matrix(particles), as_matrix(state.particles)
        assert np.linalg.norm(after) < np.linalg.norm(before)


def test_score_batches_change_nothing():
    particles = network_particles(n=23)
    whole = jsvgd.svgd(standard_normal, optax.sgd(0.1))
    batched = jsvgd.svgd(standard_normal, optax.sgd(0.1), score_batch_size=5)
    key = jax.random.key(0)
    a, _ = whole.step(key, whole.init(particles))
    b, _ = batched.step(key, batched.init(particles))
    np.testing.assert_allclose(as_matrix(a.particles), as_matrix(b.particles), rtol=1e-6)


def test_arguments_of_the_step_reach_the_log_density():
    def log_density(x, centre, scale):
        return -0.5 * jnp.sum((x - centre) ** 2) / scale

    x, _ = draw(7, 2)
    sampler = jsvgd.svgd(log_density, optax.sgd(1.0), bandwidth=2.0)
    state, _ = sampler.step(jax.random.key(0), sampler.init(x), 5.0, 2.0)
    expected = x + oracle(x, -(x - 5.0) / 2.0, np.float32(2.0))
    np.testing.assert_allclose(state.particles, expected, rtol=1e-5)


def test_chains_under_vmap_are_independent():
    chains = np.stack([draw(31, 3, seed=i, offset=i)[0] for i in range(3)])
    sampler = jsvgd.svgd(standard_normal, optax.adam(0.1))
    keys = jax.random.split(jax.random.key(0), 3)
    states = jax.vmap(sampler.init)(chains)
    states, infos = jax.jit(jax.vmap(sampler.step))(keys, states)
    for i in range(3):
        state, info = sampler.step(keys[i], sampler.init(chains[i]))
        np.testing.assert_allclose(states.particles[i], state.particles, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(infos.bandwidth[i], info.bandwidth, rtol=1e-5)


def test_a_run_can_be_differentiated_through():
    x, _ = draw(11, 2)

    def spread_after(scale, x64=False):
        sampler = jsvgd.svgd(lambda p: -0.5 * (p @ p) / scale, optax.sgd(0.3))
        state = sampler.init(x)
        step = lambda state, key: (sampler.step(key, state)[0], None)
        state, _ = jax.lax.scan(step, state, jax.random.split(jax.random.key(0), 10))
        return jnp.mean(state.particles**2)

    gradient = jax.grad(spread_after)(2.0)
    difference = (spread_after(2.02) - spread_after(1.98)) / 0.04
    np.testing.assert_allclose(gradient, difference, rtol=2e-2)


def test_it_samples_a_gaussian():
    """Mean right, variance short by the known collapse of the median rule with its logarithm."""
    centre = jnp.array([1.0, -2.0, 0.5])
    sampler = jsvgd.svgd(lambda x: -0.5 * jnp.sum((x - centre) ** 2), optax.adam(0.1))
    state = sampler.init(draw(100, 3)[0] + 4)
    state, _ = jsvgd.run(jax.random.key(0), sampler, state, 500)
    np.testing.assert_allclose(state.particles.mean(axis=0), centre, atol=0.02)
    variance = state.particles.var(axis=0)
    assert np.all((variance > 0.6) & (variance < 1.05))


def test_it_runs_inside_blackjax():
    util = pytest.importorskip("blackjax.util", reason="BlackJAX is not installed")
    particles = network_particles()
    sampler = jsvgd.svgd(standard_normal, optax.adam(0.1))
    key = jax.random.key(3)
    final, _ = util.run_inference_algorithm(key, sampler, 25, initial_position=particles)
    state, _ = jsvgd.run(key, sampler, sampler.init(particles), 25)
    assert int(final.step) == 25
    np.testing.assert_allclose(
        as_matrix(final.particles), as_matrix(state.particles), rtol=1e-4, atol=1e-5
    )


def stochastic(**options):
    return jsvgd.stochastic_svgd(standard_normal, 0.1, **options)


def test_the_sampler_names_what_is_wrong():
    with pytest.raises(
        TypeError, match="logdensity_fn must be a function of one particle, got str"
    ):
        jsvgd.svgd("normal", optax.adam(0.1))
    with pytest.raises(TypeError, match="optimizer must be an optax optimiser"):
        jsvgd.svgd(standard_normal, 0.1)
    for make in (lambda **o: jsvgd.svgd(standard_normal, optax.sgd(0.1), **o), stochastic):
        for name, value in [("temperature", "a"), ("temperature", None)]:
            with pytest.raises(TypeError, match=f"{name} must be a real number, got {value!r}"):
                make(**{name: value})
        for value in ("a", 1.5):
            message = f"score_batch_size must be a whole number, got {value!r}"
            with pytest.raises(TypeError, match=message):
                make(score_batch_size=value)
    with pytest.raises(TypeError, match="repulsion must be a real number, got 'a'"):
        jsvgd.svgd(standard_normal, optax.sgd(0.1), repulsion="a")
    with pytest.raises(TypeError, match="step_size must be a real number, got 'a'"):
        jsvgd.stochastic_svgd(standard_normal, "a")
    with pytest.raises(ValueError, match="score_batch_size must be at least 1, got 0"):
        jsvgd.svgd(standard_normal, optax.adam(0.1), score_batch_size=0)
    sampler = jsvgd.svgd(standard_normal, optax.adam(0.1))
    with pytest.raises(TypeError, match="particles must have a floating dtype"):
        sampler.init(np.arange(6).reshape(3, 2))


class _AccumulatorState(NamedTuple):
    count: jax.Array
    squares: optax.Updates


def liu_wang_adagrad(step_size, decay=0.9, epsilon=1e-6):
    """The optimiser of svgd.py: a decayed AdaGrad whose first accumulator is g^2 itself."""

    def init(params):
        return _AccumulatorState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None):
        new = jnp.where(state.count == 0, 1.0, 1 - decay)
        old = jnp.where(state.count == 0, 0.0, decay)
        squares = jax.tree.map(lambda v, g: old * v + new * g**2, state.squares, updates)
        scaled = jax.tree.map(lambda g, v: g / (epsilon + jnp.sqrt(v)), updates, squares)
        return scaled, _AccumulatorState(state.count + 1, squares)

    return optax.chain(optax.GradientTransformation(init, update), optax.scale(-step_size))


def test_liu_and_wangs_code_is_reproduced(reference_data, x64):
    path = reference_data / "svgd_reference" / "svgd_gaussian2d.json"
    recorded = json.loads(path.read_text())
    precision, mean = np.array(recorded["precision_A"]), np.array(recorded["mu"])
    x = np.array(recorded["x0"])
    scores = -(x - mean) @ precision
    np.testing.assert_allclose(scores, recorded["score_x0"], atol=1e-12)
    h = recorded["h_squared_in_exp_minus_d2_over_2h2"]
    np.testing.assert_allclose(jsvgd.median_bandwidth(x, rule="liu"), h, rtol=1e-12)
    weights = jsvgd.RBF.profile(np.sum((x[:, None] - x[None]) ** 2, axis=-1) / (2 * h))
    np.testing.assert_allclose(weights, recorded["K"], atol=1e-12)
    np.testing.assert_allclose(jsvgd.svgd_direction(x, scores, h), recorded["phi"], atol=1e-12)
    sampler = jsvgd.svgd(
        lambda x: -0.5 * (x - mean) @ precision @ (x - mean),
        liu_wang_adagrad(0.01),
        bandwidth="liu",
    )
    state = sampler.init(x)
    for steps in (1, 10, 100):
        state, _ = jsvgd.run(jax.random.key(0), sampler, state, steps - int(state.step))
        expected = recorded["trajectory"][f"adagrad_stepsize0.01_iter{steps}"]
        np.testing.assert_allclose(state.particles, expected, atol=1e-8)
