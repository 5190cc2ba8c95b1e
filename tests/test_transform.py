"""``scale_by_svgd`` as an optax transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jsvgd
import jsvgd.loop
from tests.problems import (
    as_matrix,
    draw,
    network_particles,
    oracle,
    relative_error,
    standard_normal,
)


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
