"""The loop's ways in and out: batches of iterators, early stops, keys a particle, memory, the bar."""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jsvgd
import jsvgd.loop
from tests.problems import assert_trees_equal, network_particles

KEY = jax.random.key(3)


def log_density(position, batch):
    return -0.5 * sum(jnp.sum((leaf - jnp.mean(batch)) ** 2) for leaf in jax.tree.leaves(position))


@pytest.fixture(scope="module")
def sampler():
    return jsvgd.svgd(log_density, optax.adam(0.05))


@pytest.fixture(scope="module")
def state(sampler):
    return sampler.init(network_particles())


class Loader:
    """A data loader: an iterable that can be begun anew, here with a short last batch."""

    def __init__(self, rows, size):
        self.batches = [rows[i : i + size] for i in range(0, len(rows), size)]

    def __iter__(self):
        return iter(self.batches)


def by_hand(sampler, state, batches):
    """Steps one by one, with the keys of ``run``."""
    step_key, _ = jax.random.split(KEY)
    step = jax.jit(sampler.step)
    for batch in batches:
        state, _ = step(jax.random.fold_in(step_key, state.step), state, batch)
    return state


def assert_trees_close(a, b):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), a, b)


@pytest.mark.parametrize("every", [1, 3])
def test_every_batch_of_a_loader_is_used_in_its_order(sampler, state, every):
    rows = np.arange(11, dtype=np.float32)
    loader = Loader(rows, 4)
    end, history = jsvgd.run(KEY, sampler, state, 8, data=loader, every=every)
    in_order = [*loader.batches, *loader.batches, *loader.batches][:8]
    assert_trees_close(end.particles, by_hand(sampler, state, in_order).particles)
    np.testing.assert_array_equal(history.step, [3, 6, 8] if every == 3 else np.arange(1, 9))


def test_generators_and_functions_of_the_step_give_the_same_run(sampler, state):
    batches = [np.full(3, i, np.float32) for i in range(12)]
    expected = by_hand(sampler, state, batches[:10])
    end, _ = jsvgd.run(KEY, sampler, state, 10, data=(b for b in batches))
    assert_trees_close(end.particles, expected.particles)
    half, _ = jsvgd.run(KEY, sampler, state, 6, data=lambda step: iter(batches[step:]))
    whole, _ = jsvgd.run(KEY, sampler, half, 4, data=lambda step: iter(batches[step:]))
    assert_trees_equal(whole, end)


def test_a_loader_begins_anew_with_each_call_and_an_iterator_goes_on(sampler, state):
    """What the docstring of ``run`` says of two halves."""
    batches = [np.full(3, i, np.float32) for i in range(8)]
    whole = by_hand(sampler, state, batches)
    going_on = iter(batches)
    half, _ = jsvgd.run(KEY, sampler, state, 4, data=going_on)
    end, _ = jsvgd.run(KEY, sampler, half, 4, data=going_on)
    assert_trees_close(end.particles, whole.particles)
    loader = Loader(np.repeat(np.arange(8, dtype=np.float32), 3), 3)
    half, _ = jsvgd.run(KEY, sampler, state, 4, data=loader)
    end, _ = jsvgd.run(KEY, sampler, half, 4, data=loader)
    twice = by_hand(sampler, state, [*batches[:4], *batches[:4]])
    assert_trees_close(end.particles, twice.particles)


def test_an_iterator_that_ends_ends_the_run_with_a_warning(sampler, state):
    batches = iter([np.ones(3, np.float32)] * 5)
    with pytest.warns(UserWarning, match="ended after 5 of 9 steps"):
        end, history = jsvgd.run(KEY, sampler, state, 9, data=batches, every=2)
    assert int(end.step) == 5
    np.testing.assert_array_equal(history.step, [2, 4, 5])
    with pytest.raises(ValueError, match="data must give at least one batch"):
        jsvgd.run(KEY, sampler, state, 0, data=iter(()))
    with pytest.raises(ValueError, match="an iterator gives its own"):
        jsvgd.run(KEY, sampler, state, 5, data=iter(()), batch_size=3)


def test_nothing_is_compiled_anew_for_the_same_shapes(sampler, state, tmp_path):
    pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed")
    batch = np.ones(3, np.float32)
    jsvgd.run(KEY, sampler, state, 70, data=iter([batch] * 70))
    jsvgd.run(KEY, sampler, state, 7, data=iter([batch] * 7), callback=lambda *_: False)
    compiled = jsvgd.loop._steps._cache_size()
    jsvgd.run(jax.random.key(9), sampler, state, 100, data=iter([batch] * 100), every=3)
    jsvgd.run(KEY, sampler, state, 7, data=Loader(np.ones(9, np.float32), 3), progress=True)
    checkpoint = jsvgd.Checkpoint(tmp_path / "run", every=4)
    for steps in (5, 11):
        jsvgd.run(KEY, sampler, state, steps, data=iter([batch] * 11), checkpoint=checkpoint)
    jsvgd.run(KEY, sampler, state, 9, data=lambda step: iter([batch] * 9), callback=lambda *_: 0)
    assert jsvgd.loop._steps._cache_size() == compiled


@pytest.mark.parametrize("make", ["svgd", "injected", "stochastic"])
def test_weakly_typed_particles_compile_nothing_twice(make):
    normal = lambda x: -0.5 * (x @ x)
    sampler = {
        "svgd": lambda: jsvgd.svgd(normal, optax.adam(0.05)),
        "injected": lambda: jsvgd.svgd(normal, optax.inject_hyperparams(optax.adam)(0.05)),
        "stochastic": lambda: jsvgd.stochastic_svgd(normal, 0.05),
    }[make]()
    state = sampler.init(jnp.full((5, 2), 1.0))
    compiled = jsvgd.loop._steps._cache_size()
    state, _ = jsvgd.run(KEY, sampler, state, 3)
    jsvgd.run(KEY, sampler, state, 3)
    assert jsvgd.loop._steps._cache_size() == compiled + 1


def test_several_callbacks_see_every_record(sampler, state):
    seen = [], []
    callbacks = [
        lambda step, *_: seen[0].append(step) or step >= 6,
        lambda step, *_: seen[1].append(step),
    ]
    end, _ = jsvgd.run(
        KEY, sampler, state, 20, data=np.ones(3, np.float32), every=3, callback=callbacks
    )
    assert seen == ([3, 6], [3, 6])
    assert int(end.step) == 6
    with pytest.raises(TypeError, match="callback must be a function or several, got int"):
        jsvgd.run(KEY, sampler, state, 20, callback=[3])


# --- early stops ------------------------------------------------------------------------------------


def normal(position):
    return -0.5 * (position @ position)


def started(sampler, n=40, offset=5.0):
    x = np.random.default_rng(0).normal(size=(n, 2)).astype(np.float32)
    return sampler.init(x + np.float32(offset))


def test_a_run_stops_where_particles_rest():
    sampler = jsvgd.svgd(normal, optax.sgd(0.5))
    stop = jsvgd.StopOnMovement(1e-3, patience=2)
    end, history = jsvgd.run(KEY, sampler, started(sampler), 5000, every=10, callback=stop)
    steps = int(end.step)
    assert 50 < steps < 3000
    further, _ = jsvgd.run(KEY, sampler, end, 10)
    moved = np.sqrt(np.mean(np.sum(np.square(further.particles - end.particles), axis=1)))
    spread = np.sqrt(np.sum(np.var(np.asarray(end.particles), axis=0)))
    assert moved / spread < 1e-3
    again, _ = jsvgd.run(KEY, sampler, started(sampler), 5000, every=10, callback=stop)
    assert int(again.step) == steps  # the callback begins anew with a new run
    assert len(history.step) == steps // 10


def test_a_run_stops_where_the_discrepancy_is_small():
    sampler = jsvgd.svgd(normal, optax.adam(0.1))
    stop = jsvgd.StopOnKSD(normal, 0.2)
    end, _ = jsvgd.run(KEY, sampler, started(sampler), 2000, every=10, callback=stop)
    assert 10 < int(end.step) < 2000
    discrepancy = lambda state: float(jsvgd.diagnostics.ksd(state.particles, -state.particles))
    assert discrepancy(end) < 0.2 < discrepancy(started(sampler))


def test_particles_that_move_again_are_counted_anew():
    """Rest, rest, a move, rest, rest: patience is three records in a row."""
    place = lambda x: argparse.Namespace(particles=np.float32([[x], [x + 1.0]]))
    stop = jsvgd.StopOnMovement(0.1, patience=3)
    moves = [0, 0, 0, 5, 5, 5, 5]
    calls = [stop(i, place(x), None) for i, x in enumerate(moves)]
    assert calls == [False, False, False, False, False, False, True]


def test_the_discrepancy_is_that_of_the_data():
    """Far from the data given by ``args`` a run goes on; where they lie it stops."""
    x = np.random.default_rng(0).normal(size=(200, 2)).astype(np.float32)
    density = lambda position, centre: -0.5 * jnp.sum((position - centre) ** 2)
    here = argparse.Namespace(particles=x)
    for centre, stops in [(0.0, True), (3.0, False)]:
        stop = jsvgd.StopOnKSD(density, 0.3, args=(np.float32(centre),))
        assert stop(1, here, None) is stops


def test_stops_name_what_is_wrong():
    for stop in (jsvgd.StopOnMovement, functools.partial(jsvgd.StopOnKSD, normal)):
        with pytest.raises(ValueError, match=r"tolerance must be positive, got 0\.0"):
            stop(0.0)
    with pytest.raises(ValueError, match="patience must be at least 1, got 0"):
        jsvgd.StopOnMovement(patience=0)
    with pytest.raises(TypeError, match="logdensity_fn must be a function, got int"):
        jsvgd.StopOnKSD(3, 0.1)


# --- the log density --------------------------------------------------------------------------------


@pytest.mark.parametrize("score_batch_size", [None, 4])
def test_every_particle_and_step_has_a_key_of_its_own(score_batch_size):
    def noisy(position, rng_key):
        return position @ jax.random.normal(rng_key, position.shape)

    sampler = jsvgd.svgd(
        noisy,
        optax.sgd(1.0),
        bandwidth=1e-6,  # every particle for itself: the step is its own score over N
        per_particle_keys=True,
        score_batch_size=score_batch_size,
    )
    x = 10 * np.arange(18, dtype=np.float32).reshape(9, 2)
    state = sampler.init(x)
    one, _ = sampler.step(jax.random.key(0), state)
    two, _ = sampler.step(jax.random.key(1), state)
    draws = np.concatenate([9 * (one.particles - x), 9 * (two.particles - x)])
    assert len(np.unique(np.round(draws, 4), axis=0)) == 18
    keys = jax.random.split(jax.random.key(0), 9)
    expected = jax.vmap(lambda key: jax.random.normal(key, (2,)))(keys)
    np.testing.assert_allclose(draws[:9], expected, atol=1e-3)


def test_score_batches_need_less_memory():
    """64 networks of 2 x 32 hidden units on 4096 rows: activations are what fills the memory."""

    def log_density(position, x):
        hidden = jnp.tanh(x @ position["first"])
        return -jnp.sum((jnp.tanh(hidden @ position["second"]) - 0.5) ** 2)

    particles = {
        "first": jax.ShapeDtypeStruct((64, 8, 32), jnp.float32),
        "second": jax.ShapeDtypeStruct((64, 32, 32), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((4096, 8), jnp.float32)

    def peak(score_batch_size):
        sampler = jsvgd.svgd(log_density, optax.sgd(0.1), score_batch_size=score_batch_size)
        state = jax.eval_shape(lambda p: sampler.init(p), particles)
        key = jax.eval_shape(lambda: jax.random.key(0))
        compiled = jax.jit(sampler.step).lower(key, state, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    together, chunked = peak(None), peak(8)
    activations = 64 * 4096 * 32 * 4
    assert together > 2 * activations
    assert chunked < together / 4


def test_the_bar_shows_the_numbers_that_matter(sampler, state, capsys):
    jsvgd.run(KEY, sampler, state, 30, data=np.ones(3, np.float32), progress=True)
    shown = capsys.readouterr().err
    for what in ("log p=", "bandwidth=", "spread=", "direction=", "30/30", "step/s"):
        assert what in shown
    assert "non-finite" not in shown


def test_history_holds_the_mean_log_density(sampler, state):
    batch = np.ones(3, np.float32)
    _, history = jsvgd.run(KEY, sampler, state, 1, data=batch)
    each = jax.vmap(lambda p: log_density(p, batch))(state.particles)
    np.testing.assert_allclose(history.info.log_density[0], np.mean(each), rtol=1e-5)
