"""The optax transformation, the sampler and the loop."""

import functools
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jsvgd
import jsvgd.loop
from tests.problems import draw, oracle, relative_error


def standard_normal(position, *args):
    return -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(position))


def network_particles(n=20, dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "weights": (jax.random.normal(keys[0], (n, 3, 2)) + 3).astype(dtype),
        "bias": jax.random.normal(keys[1], (n, 2)).astype(dtype),
        "log_scale": jax.random.normal(keys[2], (n,)).astype(dtype),
    }


def as_matrix(particles):
    leaves = jax.tree.leaves(particles)
    return np.concatenate([np.asarray(a, np.float64).reshape(len(a), -1) for a in leaves], axis=1)


def assert_trees_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


# --- scale_by_svgd --------------------------------------------------------------------------------


def test_the_transformation_returns_minus_phi_for_a_pytree():
    particles = network_particles()
    gradients = particles  # of -log N(0, I)
    transform = jsvgd.scale_by_svgd(bandwidth=2.5)
    updates, state = transform.update(gradients, transform.init(particles), particles)
    x = as_matrix(particles)
    assert relative_error(as_matrix(updates), -oracle(x, -x, 2.5)) <= 2e-5
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, particles)
    assert int(state.count) == 1
    assert float(state.bandwidth) == 2.5


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
def test_the_transformation_passes_its_options_on(kernel):
    x, s = draw(23, 4)
    h = np.float32(1.5)
    transform = jsvgd.scale_by_svgd(kernel=kernel, bandwidth=h, repulsion=0.25)
    updates, _ = transform.update(-s, transform.init(x), x)
    assert relative_error(-updates, oracle(x, s, h, kernel=kernel, repulsion=0.25)) <= 2e-5


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(1e-2),
        optax.adagrad(1e-1),
        optax.chain(
            optax.clip_by_global_norm(1.0), optax.sgd(optax.cosine_decay_schedule(0.1, 50))
        ),
        optax.inject_hyperparams(optax.rmsprop)(learning_rate=1e-2),
    ],
)
def test_it_chains_with_optax(optimizer):
    optimizer = optax.chain(jsvgd.scale_by_svgd(), optimizer)
    particles = network_particles()
    state = optimizer.init(particles)

    @jax.jit
    def step(particles, state):
        gradients = jax.vmap(jax.grad(lambda p: -standard_normal(p)))(particles)
        updates, state = optimizer.update(gradients, state, particles)
        return optax.apply_updates(particles, updates), state

    for _ in range(30):
        moved, state = step(particles, state)
        assert not np.array_equal(as_matrix(moved), as_matrix(particles))
        particles = moved
    assert abs(as_matrix(particles).mean()) < abs(as_matrix(network_particles()).mean())


def test_the_transformation_names_what_is_wrong():
    x, _ = draw(5, 2)
    transform = jsvgd.scale_by_svgd()
    state = transform.init(x)
    with pytest.raises(ValueError, match="needs the particles"):
        transform.update(x, state)
    with pytest.raises(ValueError, match="updates must have the structure of params"):
        transform.update({"a": x}, state, x)
    with pytest.raises(ValueError, match=r"shapes of params, \(5, 2\), got \(5, 1, 2\)"):
        transform.update(x[:, None], state, x)
    with pytest.raises(ValueError, match=r"params\['b'\] must have a leading particle axis"):
        transform.init({"a": x, "b": jnp.float32(1.0)})
    with pytest.raises(ValueError, match=r"agree in their number of particles.*'a'.*5.*'b'.*4"):
        transform.init({"a": x, "b": x[:4]})
    with pytest.raises(TypeError, match=r"params\['a'\] must have a floating dtype, got int32"):
        transform.init({"a": jnp.arange(3)})
    with pytest.raises(ValueError, match="at least one array"):
        transform.init({})
    with pytest.raises(ValueError, match="at least one particle"):
        transform.init(x[:0])
    for option, value in [
        ("kernel", "gauss"),
        ("bandwidth", "mean"),
        ("precision", "exact"),
        ("implementation", "cuda"),
    ]:
        with pytest.raises(ValueError, match=f"{value}"):
            jsvgd.scale_by_svgd(**{option: value})


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


# --- Liu and Wang's own code ----------------------------------------------------------------------


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


# --- run ------------------------------------------------------------------------------------------


@pytest.fixture
def gaussian():
    def log_density(position, batch=None):
        data = 0.0 if batch is None else jnp.mean(batch["y"])
        return standard_normal(jax.tree.map(lambda leaf: leaf - data, position))

    sampler = jsvgd.svgd(log_density, optax.adam(0.05))
    rows = {"y": np.arange(23, dtype=np.float32) / 10, "x": np.zeros((23, 2), np.float32)}
    return sampler, sampler.init(network_particles()), rows


@pytest.mark.parametrize("batches", [{}, {"data": True}, {"data": True, "batch_size": 5}])
def test_two_halves_are_bitwise_the_whole(gaussian, batches):
    sampler, state, rows = gaussian
    options = {**batches, "data": rows} if batches else {}
    key = jax.random.key(7)
    before = jax.tree.map(np.array, state)
    whole, _ = jsvgd.run(key, sampler, state, 100, every=7, **options)
    compiled = jsvgd.loop._steps._cache_size()
    half, _ = jsvgd.run(key, sampler, state, 50, **options)
    half, _ = jsvgd.run(key, sampler, half, 50, every=3, **options)
    assert_trees_equal(half, whole)
    assert_trees_equal(before, state)
    assert jsvgd.loop._steps._cache_size() == compiled
    assert int(whole.step) == 100


def test_history_is_what_single_steps_give(gaussian):
    sampler, state, _ = gaussian
    key = jax.random.key(7)
    end, history = jsvgd.run(key, sampler, state, 11, every=4, keep_particles=True)
    np.testing.assert_array_equal(history.step, [4, 8, 11])
    assert_trees_equal(jax.tree.map(lambda a: a[-1], history.particles), end.particles)
    at_four, _ = jsvgd.run(key, sampler, state, 4)
    assert_trees_equal(jax.tree.map(lambda a: a[0], history.particles), at_four.particles)
    _, single = jsvgd.run(key, sampler, state, 4, every=1)
    np.testing.assert_array_equal(single.info.direction_norm[3], history.info.direction_norm[0])
    _, nothing = jsvgd.run(key, sampler, state, 0, keep_particles=True)
    assert nothing.step.shape == (0,)
    assert nothing.particles["bias"].shape == (0, 20, 2)


def test_a_long_run_keeps_all_of_its_history(gaussian):
    sampler, state, _ = gaussian
    _, history = jsvgd.run(jax.random.key(7), sampler, state, 3 * 64 + 5)
    np.testing.assert_array_equal(history.step, np.arange(1, 3 * 64 + 6))


def test_minibatches_visit_every_row_once_an_epoch():
    rows = np.arange(20, dtype=np.float32)

    def log_density(x, batch):
        # The score is the sum of 2^row over the batch: which rows came shows in its bits.
        return jnp.sum(2.0**batch) * x[0]

    sampler = jsvgd.svgd(log_density, optax.sgd(1.0), bandwidth=1.0)
    state = sampler.init(np.zeros((1, 1), np.float32))
    key = jax.random.key(0)
    _, history = jsvgd.run(key, sampler, state, 12, data=rows, batch_size=5)
    masks = np.asarray(history.info.score_norm).astype(np.int64)
    assert all(bin(mask).count("1") == 5 for mask in masks)
    epochs = masks.reshape(3, 4)
    np.testing.assert_array_equal(epochs.sum(axis=1), 2**20 - 1)
    assert len({tuple(epoch) for epoch in epochs}) == 3  # a new order each epoch
    _, other = jsvgd.run(jax.random.key(1), sampler, state, 12, data=rows, batch_size=5)
    assert not np.array_equal(other.info.score_norm, history.info.score_norm)


def test_callbacks_see_the_state_and_can_stop(gaussian):
    sampler, state, _ = gaussian
    seen = []

    def callback(step, state, info):
        seen.append((step, int(state.step), float(info.direction_norm)))
        return step >= 10

    end, history = jsvgd.run(jax.random.key(7), sampler, state, 100, every=5, callback=callback)
    assert [s[:2] for s in seen] == [(5, 5), (10, 10)]
    assert int(end.step) == 10
    np.testing.assert_allclose(history.info.direction_norm, [s[2] for s in seen])


def test_the_progress_bar_tells_bandwidth_and_direction(gaussian, capsys):
    sampler, state, _ = gaussian
    jsvgd.run(jax.random.key(7), sampler, state, 30, progress=True)
    shown = capsys.readouterr().err
    assert "30/30" in shown
    assert "bandwidth=" in shown
    assert "direction=" in shown


def test_run_names_what_is_wrong(gaussian):
    sampler, state, rows = gaussian
    run = functools.partial(jsvgd.run, jax.random.key(0), sampler, state)
    for message, call in [
        ("num_steps must be at least 0, got -1", lambda: run(-1)),
        ("every must be at least 1, got 0", lambda: run(5, every=0)),
        ("batch_size must be at most the 23 rows", lambda: run(5, data=rows, batch_size=24)),
        ("batch_size must be at least 1, got 0", lambda: run(5, data=rows, batch_size=0)),
        ("batch_size=5 needs data", lambda: run(5, batch_size=5)),
        ("data must hold at least one row", lambda: run(5, data=np.zeros((0, 2)))),
        ("data must hold arrays with a leading axis", lambda: run(5, data=())),
        ("agree in their number of rows", lambda: run(5, data=(np.zeros(3), np.zeros(4)))),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    for key in (0, None, "key", np.zeros((2, 2), np.uint32), np.zeros(2, np.float32)):
        with pytest.raises(TypeError, match=r"rng_key must be a key of jax\.random\.key, got"):
            jsvgd.run(key, sampler, state, 2)
    with pytest.raises(ValueError, match=r"rng_key must be one key, got keys of shape \(3,\)"):
        jsvgd.run(jax.random.split(jax.random.key(0), 3), sampler, state, 2)
    with pytest.raises(TypeError, match="sampler must have init and step.*got NoneType"):
        jsvgd.run(jax.random.key(0), None, state, 2)
    with pytest.raises(TypeError, match="num_steps must be a whole number, got 2.5"):
        run(2.5)
    with pytest.raises(TypeError, match="callback must be a function or several, got int"):
        run(2, callback=3)
    key = jax.random.key(0)
    with pytest.raises(
        TypeError, match=r"state must come from sampler.init\(particles\), got dict"
    ):
        jsvgd.run(key, sampler, state.particles, 2)
    with pytest.raises(ValueError, match="state must be that of one sampler, got a batch of"):
        jsvgd.run(key, sampler, jax.tree.map(lambda a: jnp.stack([a, a]), state), 2)
    with pytest.raises(TypeError, match="run does not work inside jit or vmap"):
        jax.jit(lambda state: jsvgd.run(key, sampler, state, 2))(state)
