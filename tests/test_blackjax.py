"""BlackJAX: its SVGD gives the same particles, and its loop runs the sampler unchanged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jsvgd

blackjax = pytest.importorskip("blackjax", reason="BlackJAX is not installed")

MEAN = jnp.array([1.0, -2.0, 0.5])
PRECISION = jnp.array([[2.0, 0.6, 0.0], [0.6, 1.0, -0.3], [0.0, -0.3, 0.5]])


def log_density(position):
    centred = position["x"] - MEAN
    return -0.5 * centred @ PRECISION @ centred - jnp.sum(jnp.cosh(position["y"]))


def particles(n=40):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(n, 3)).astype(np.float32),
        "y": rng.normal(size=(n, 2)).astype(np.float32),
    }


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.3), optax.adagrad(0.3), optax.adam(0.05)],
    ids=["sgd", "adagrad", "adam"],
)
def test_the_same_particles_as_blackjaxs_svgd(optimizer):
    from blackjax.vi.svgd import median_heuristic

    theirs = blackjax.svgd(jax.grad(log_density), optimizer)
    # They update the length scale after a step; the first one is given.
    first = median_heuristic({}, jax.tree.map(jnp.asarray, particles()))
    state = theirs.init(particles(), first)
    step = jax.jit(theirs.step)
    for _ in range(50):
        state = step(state)
    ours = jsvgd.svgd(log_density, optimizer, bandwidth="blackjax", precision="highest")
    mine, _ = jsvgd.run(jax.random.key(0), ours, ours.init(particles()), 50)
    assert not np.allclose(mine.particles["x"], particles()["x"], atol=0.1)
    for name in ("x", "y"):
        np.testing.assert_allclose(mine.particles[name], state.particles[name], atol=1e-5)


@pytest.mark.parametrize("groups", [None, "leaf"])
def test_it_runs_inside_blackjaxs_loop_unchanged(groups):
    sampler = jsvgd.svgd(log_density, optax.adam(0.05), groups=groups)
    key = jax.random.key(3)
    final, history = blackjax.util.run_inference_algorithm(
        key, sampler, 25, initial_position=particles(), transform=lambda state, info: info
    )
    state, mine = jsvgd.run(key, sampler, sampler.init(particles()), 25)
    assert int(final.step) == 25
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, final.particles, state.particles)
    jax.tree.map(close, history.bandwidth, mine.info.bandwidth)
    jax.tree.map(close, history.log_density, mine.info.log_density)
