"""``run``: history, halves, callbacks, minibatches, the progress bar."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jsvgd
import jsvgd.loop
from tests.problems import (
    assert_trees_equal,
    network_particles,
    standard_normal,
)


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
