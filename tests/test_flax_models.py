"""Predictive probabilities of classes, and trained models as particles."""

import functools
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from flax import nnx
from flax.training.train_state import TrainState

import jsvgd
import jsvgd.flax
from jsvgd.flax import Position
from tests.networks import INPUTS, LinenNetwork

RNG = np.random.default_rng(0)
CLASSES = np.array([0, 2, 1, 1, 0, 2])


# --- predictives of classes -------------------------------------------------------------------------


def linear(params, x):
    return x @ params


def test_class_probabilities_are_the_mixtures():
    weights = jnp.asarray(RNG.normal(size=(4, 2, 3)), jnp.float32)
    particles = Position(weights, (), ())
    x = RNG.normal(size=(6, 2)).astype(np.float32)
    each = scipy.special.softmax(np.einsum("bi,nik->nbk", x, weights), axis=-1)
    got = jsvgd.flax.class_probabilities(linear, particles, x)
    np.testing.assert_allclose(got, each.mean(0), rtol=1e-5)
    categorical = jsvgd.flax.categorical_likelihood()
    log_density = jsvgd.flax.log_predictive_density(
        linear, particles, x, CLASSES, likelihood=categorical
    )
    expected = np.log(each.mean(0)[np.arange(6), CLASSES])
    np.testing.assert_allclose(log_density, expected, rtol=1e-4)

    binary = Position(weights[:, :, 0], (), ())
    bernoulli = jsvgd.flax.bernoulli_likelihood()
    got = jsvgd.flax.class_probabilities(linear, binary, x, likelihood=bernoulli)
    probability = (1 / (1 + np.exp(-np.einsum("bi,ni->nb", x, weights[:, :, 0])))).mean(0)
    np.testing.assert_allclose(got, np.stack([1 - probability, probability], 1), rtol=1e-5)

    with pytest.raises(ValueError, match="one of classes, got one of count targets"):
        poisson = jsvgd.flax.poisson_likelihood()
        jsvgd.flax.class_probabilities(linear, binary, x, likelihood=poisson)
    with pytest.raises(ValueError, match="target_scale must be left out"):
        jsvgd.flax.predict(linear, binary, x, likelihood=bernoulli, target_scale=2.0)


def test_a_list_of_trained_nnx_models_becomes_particles():
    constructor = functools.partial(nnx.Linear, 3, 2)
    models = [constructor(rngs=nnx.Rngs(i)) for i in range(5)]
    params = jsvgd.flax.particles_from_models(models)
    network = jsvgd.flax.functional(constructor)
    outputs = jax.vmap(network.apply, (0, None))(params, INPUTS)
    np.testing.assert_allclose(outputs, np.stack([m(INPUTS) for m in models]), rtol=1e-6)


def test_a_list_of_linen_variables_or_train_states_becomes_particles():
    module = LinenNetwork()
    variables = [module.init(jax.random.key(i), INPUTS) for i in range(3)]
    network = jsvgd.flax.functional(module, INPUTS)
    expected = np.stack([module.apply(v, INPUTS) for v in variables])
    states = [types.SimpleNamespace(params=v["params"]) for v in variables]
    for models in (variables, [v["params"] for v in variables], states):
        params = jsvgd.flax.particles_from_models(models)
        outputs = jax.vmap(network.apply, (0, None))(params, INPUTS)
        np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


def test_lists_that_are_no_ensemble_are_refused():
    with pytest.raises(ValueError, match="at least one model, got none"):
        jsvgd.flax.particles_from_models([])
    other = [nnx.Linear(3, k, rngs=nnx.Rngs(0)) for k in (2, 4)]
    with pytest.raises(ValueError, match="one architecture; model 1 has"):
        jsvgd.flax.particles_from_models(other)
    with pytest.raises(ValueError, match=r"keeps state.*BatchStat"):
        jsvgd.flax.particles_from_models([nnx.BatchNorm(3, rngs=nnx.Rngs(0))])
    tx, apply = optax.sgd(0.1), lambda variables, x: x
    params = {"w": jnp.ones(3)}

    class WithState(TrainState):
        batch_stats: typing.Any = None

    for beside, fits in [({}, True), ({"mean": jnp.zeros(3)}, False), ({"w": jnp.zeros(3)}, True)]:
        models = [WithState.create(apply_fn=apply, params=params, tx=tx, batch_stats=beside)] * 2
        if fits:  # no variables, or an average of the parameters
            assert jsvgd.flax.particles_from_models(models)["w"].shape == (2, 3)
        else:
            with pytest.raises(ValueError, match=r"WithState keeps state.*batch_stats \(a field"):
                jsvgd.flax.particles_from_models(models)
    with pytest.raises(ValueError, match="collection 'batch_stats'"):
        jsvgd.flax.particles_from_models([{"params": {"w": 1.0}, "batch_stats": {"m": 0.0}}])
