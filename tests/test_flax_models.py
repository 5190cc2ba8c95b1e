"""Likelihoods and priors against SciPy, trained models as particles, kernels a layer."""

import functools
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from flax import linen, nnx
from flax.training.train_state import TrainState

import jsvgd
import jsvgd.flax
from jsvgd.flax import Position
from tests.problems import oracle, relative_error

RNG = np.random.default_rng(0)
OUTPUTS = RNG.normal(size=6)
CLASSES = np.array([0, 2, 1, 1, 0, 2])
LOGITS = RNG.normal(size=(6, 3)) * 3
RAW = RNG.normal(size=6)
COUNTS = np.array([0, 1, 5, 2, 0, 9])
FLAGS = np.array([0, 1, 1, 0, 1, 0])


def softplus(x):
    return np.log1p(np.exp(x))


LIKELIHOODS = {
    "fixed": (
        jsvgd.flax.fixed_gaussian_likelihood(0.3),
        OUTPUTS,
        RAW,
        lambda y: scipy.stats.norm.logpdf(y, OUTPUTS, 0.3),
        OUTPUTS,
        np.full(6, 0.09),
    ),
    "heteroscedastic": (
        jsvgd.flax.heteroscedastic_likelihood(0.01),
        np.stack([OUTPUTS, RAW], axis=1),
        LOGITS[:, 0],
        lambda y: scipy.stats.norm.logpdf(y, OUTPUTS, 0.01 + softplus(RAW)),
        OUTPUTS,
        (0.01 + softplus(RAW)) ** 2,
    ),
    "bernoulli": (
        jsvgd.flax.bernoulli_likelihood(),
        OUTPUTS[:, None],
        FLAGS,
        lambda y: scipy.stats.bernoulli.logpmf(y, 1 / (1 + np.exp(-OUTPUTS))),
        1 / (1 + np.exp(-OUTPUTS)),
        scipy.stats.bernoulli.var(1 / (1 + np.exp(-OUTPUTS))),
    ),
    "categorical": (
        jsvgd.flax.categorical_likelihood(),
        LOGITS,
        CLASSES,
        lambda y: np.log(scipy.special.softmax(LOGITS, axis=1)[np.arange(6), y]),
        scipy.special.softmax(LOGITS, axis=1),
        scipy.special.softmax(LOGITS, axis=1) * (1 - scipy.special.softmax(LOGITS, axis=1)),
    ),
    "poisson": (
        jsvgd.flax.poisson_likelihood(),
        OUTPUTS,
        COUNTS,
        lambda y: scipy.stats.poisson.logpmf(y, np.exp(OUTPUTS)),
        np.exp(OUTPUTS),
        np.exp(OUTPUTS),
    ),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihoods_are_scipys(x64, name):
    likelihood, outputs, targets, log_density, mean, variance = LIKELIHOODS[name]
    own = likelihood.init(jax.random.key(0))
    assert jax.tree.leaves(own) == []
    assert likelihood.log_prior(own) == 0
    outputs = jnp.asarray(outputs)
    got = likelihood.log_density(own, outputs, targets)
    np.testing.assert_allclose(got, log_density(targets), rtol=1e-10)
    np.testing.assert_allclose(likelihood.mean(own, outputs), mean, rtol=1e-10)
    np.testing.assert_allclose(likelihood.variance(own, outputs), variance, rtol=1e-10)


def test_likelihoods_refuse_what_they_cannot_take():
    categorical = jsvgd.flax.categorical_likelihood()
    with pytest.raises(ValueError, match=r"whole numbers of shape \(6,\).*got float32"):
        categorical.log_density((), jnp.asarray(LOGITS), jnp.asarray(CLASSES, jnp.float32))
    with pytest.raises(ValueError, match=r"whole numbers of shape \(6,\).*shape \(6, 1\)"):
        categorical.log_density((), jnp.asarray(LOGITS), CLASSES[:, None])
    with pytest.raises(ValueError, match=r"even last axis.*\(6, 3\)"):
        jsvgd.flax.heteroscedastic_likelihood().log_density((), jnp.asarray(LOGITS), OUTPUTS)
    with pytest.raises(ValueError, match=r"sd must be positive, got 0\.0"):
        jsvgd.flax.fixed_gaussian_likelihood(0.0)


def test_classes_out_of_range_are_refused_or_nan():
    likelihood = jsvgd.flax.categorical_likelihood()
    logits = jnp.zeros((3, 4))
    for classes, first in [([0, 3, 4], 4), ([-1, 0, 7], -1)]:
        message = rf"targets must be classes from 0 to 3, .*got {first}\b"
        with pytest.raises(ValueError, match=message):
            likelihood.log_density((), logits, np.array(classes))
        with pytest.raises(ValueError, match=message):
            jax.jit(lambda c=classes: likelihood.log_density((), logits, np.array(c)))()
        traced = jax.jit(lambda c: likelihood.log_density((), logits, c))(np.array(classes))
        unknown = (np.array(classes) < 0) | (np.array(classes) > 3)
        np.testing.assert_array_equal(np.isnan(traced), unknown)
        with pytest.raises(ValueError, match=message):
            jsvgd.flax.log_predictive_density(
                lambda params, x: params * x,
                Position(jnp.ones(2), (), ()),
                logits,
                np.array(classes),
                likelihood=likelihood,
            )


def test_numbers_of_priors_and_likelihoods_are_numbers():
    for make, name in [
        (jsvgd.flax.fixed_normal_prior, "sd"),
        (jsvgd.flax.laplace_prior, "scale"),
        (jsvgd.flax.normal_prior, "shape"),
        (jsvgd.flax.fixed_gaussian_likelihood, "sd"),
    ]:
        with pytest.raises(TypeError, match=f"{name} must be a real number, got 'a'"):
            make("a")


PARAMS = {
    "hidden": {"kernel": RNG.normal(size=(3, 2)), "bias": RNG.normal(size=2)},
    "output": {"kernel": RNG.normal(size=(2, 1)) * 5},
}


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize(
    ("prior", "distribution"),
    [
        (jsvgd.flax.fixed_normal_prior(2.0), scipy.stats.norm(0, 2.0)),
        (jsvgd.flax.laplace_prior(0.7), scipy.stats.laplace(0, 0.7)),
    ],
)
def test_priors_without_parameters_are_scipys(x64, prior, distribution):
    assert prior.init(jax.random.key(0), PARAMS) == ()
    got = prior.log_density((), PARAMS)
    np.testing.assert_allclose(got, distribution.logpdf(flat(PARAMS)).sum(), rtol=1e-10)


def log_half_cauchy(log_value, scale=1.0):
    return scipy.stats.halfcauchy.logpdf(np.exp(log_value), scale=scale) + log_value


def test_the_horseshoe_is_scipys(x64):
    prior = jsvgd.flax.horseshoe_prior(0.2)
    own = prior.init(jax.random.key(1), PARAMS)
    local = flat(own["log_local"])
    assert len(np.unique(local)) == flat(PARAMS).size
    expected = (
        scipy.stats.norm.logpdf(flat(PARAMS), 0, np.exp(own["log_global"] + local)).sum()
        + log_half_cauchy(local).sum()
        + log_half_cauchy(np.asarray(own["log_global"]), 0.2)
    )
    np.testing.assert_allclose(prior.log_density(own, PARAMS), expected, rtol=1e-10)
    many = prior.init(jax.random.key(2), jnp.zeros(20_000))
    assert scipy.stats.kstest(np.exp(many["log_local"]), scipy.stats.halfcauchy.cdf).pvalue > 1e-3


def test_every_layer_may_have_a_scale_of_its_own(x64):
    learned = jsvgd.flax.per_layer_prior(jsvgd.flax.normal_prior())
    own = learned.init(jax.random.key(0), PARAMS)
    assert sorted(own) == ["hidden", "output"] and own["hidden"] != own["output"]
    normal = jsvgd.flax.normal_prior()
    expected = sum(normal.log_density(own[name], PARAMS[name]) for name in own)
    np.testing.assert_allclose(learned.log_density(own, PARAMS), expected, rtol=1e-12)

    scales = {"hidden": 0.5, "output": 3.0}
    given = jsvgd.flax.per_layer_prior(lambda name: jsvgd.flax.fixed_normal_prior(scales[name]))
    expected = sum(
        scipy.stats.norm.logpdf(flat(PARAMS[name]), 0, scale).sum()
        for name, scale in scales.items()
    )
    got = given.log_density(given.init(jax.random.key(0), PARAMS), PARAMS)
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    with pytest.raises(TypeError, match="prior must be a Prior or a function of a label, got str"):
        jsvgd.flax.per_layer_prior("normal")


def test_positions_hold_what_the_prior_learns():
    params = jax.tree.map(lambda a: np.stack([a, a + 1, a - 1]).astype(np.float32), PARAMS)
    prior = jsvgd.flax.horseshoe_prior()
    likelihood = jsvgd.flax.poisson_likelihood()
    particles = jsvgd.flax.init_positions(
        jax.random.key(0), params, prior=prior, likelihood=likelihood
    )
    assert particles.prior["log_local"]["hidden"]["kernel"].shape == (3, 3, 2)
    assert len(np.unique(particles.prior["log_global"])) == 3
    assert particles.likelihood == ()

    def apply(params, x):
        hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        return hidden @ params["output"]["kernel"]

    logdensity_fn = jsvgd.flax.log_posterior(apply, data_size=6, likelihood=likelihood, prior=prior)
    sampler = jsvgd.svgd(logdensity_fn, optax.adam(1e-2))
    x = RNG.normal(size=(6, 3)).astype(np.float32)
    _, history = jsvgd.run(
        jax.random.key(0), sampler, sampler.init(particles), 50, data=(x, COUNTS)
    )
    assert history.info.log_density[-1] > history.info.log_density[0]
    assert int(history.info.num_nonfinite[-1]) == 0


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


# --- trained models as particles ---------------------------------------------------------------------


class LinenNetwork(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(linen.tanh(linen.Dense(4)(x)))


INPUTS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


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


# --- one kernel a layer -----------------------------------------------------------------------------


def particle_tree(n=21):
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda a: rng.normal(size=(n, *a.shape)).astype(np.float32), {"params": PARAMS}
    )


def matrix(tree):
    return np.concatenate([np.reshape(a, (len(a), -1)) for a in jax.tree.leaves(tree)], axis=1)


def test_kernels_a_layer_are_the_direction_of_each_layer_alone():
    particles = particle_tree()
    transform = jsvgd.scale_by_svgd_per_group("layer", bandwidth="no_log")
    updates, state = transform.update(particles, transform.init(particles), particles)
    assert jax.tree.structure(updates) == jax.tree.structure(particles)
    for name in ("hidden", "output"):
        x = matrix(particles["params"][name])
        h = jsvgd.median_bandwidth(x, rule="no_log")
        np.testing.assert_allclose(state.bandwidth[f"params.{name}"], h, rtol=1e-6)
        assert relative_error(matrix(updates["params"][name]), -oracle(x, -x, h)) < 2e-5
    assert int(state.count) == 1


def test_groups_by_leaf_by_function_and_of_one():
    particles = particle_tree()
    by_leaf = jsvgd.scale_by_svgd_per_group("leaf").init(particles)
    assert sorted(by_leaf.groups) == [
        "params.hidden.bias",
        "params.hidden.kernel",
        "params.output.kernel",
    ]
    together = jsvgd.scale_by_svgd_per_group(lambda path: "all", bandwidth=2.0)
    one, _ = together.update(particles, together.init(particles), particles)
    plain = jsvgd.scale_by_svgd(bandwidth=2.0)
    expected, _ = plain.update(particles, plain.init(particles), particles)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), one, expected)
    ends = jsvgd.scale_by_svgd_per_group(lambda path: path[-1]).init(particles)
    assert sorted(ends.groups) == ["bias", "kernel"]


def test_the_layers_of_nnx_and_linen_networks_are_found():
    nnx_params = jsvgd.flax.init_particles(
        jax.random.key(0), lambda rngs: nnx.List([nnx.Linear(2, 3, rngs=rngs)] * 1), 4
    )
    linen_params = jsvgd.flax.init_particles(jax.random.key(0), LinenNetwork(), 4, INPUTS)
    nnx_groups = jsvgd.scale_by_svgd_per_group().init(nnx_params).groups
    linen_groups = jsvgd.scale_by_svgd_per_group().init(linen_params).groups
    assert list(nnx_groups) == ["0"]
    assert sorted(linen_groups) == ["Dense_0", "Dense_1"]


def test_leaves_called_value_are_leaves():
    class Pair(typing.NamedTuple):
        value: jax.Array
        scale: jax.Array

    leaf = np.ones((4, 2), np.float32)
    found = lambda tree, how: list(jsvgd.scale_by_svgd_per_group(how).init(tree).groups)
    assert found({"a": {"value": leaf, "b": leaf}}, "layer") == ["a"]
    assert found({"a": {"value": leaf, "b": leaf}}, "leaf") == ["a.b", "a.value"]
    assert sorted(found(Pair(leaf, leaf), "leaf")) == ["scale", "value"]
    assert found({"in": Pair(leaf, leaf), "out": leaf}, "layer") == ["in", ""]
    params = jsvgd.flax.init_particles(
        jax.random.key(0), lambda rngs: nnx.Linear(2, 3, rngs=rngs), 4
    )
    assert found(params, "leaf") == ["bias", "kernel"]


def test_groups_that_cannot_be_are_named():
    leaf = np.ones((4, 2), np.float32)
    with pytest.raises(ValueError, match=r"leaves at a/b and at a\.b would both be called 'a\.b'"):
        jsvgd.scale_by_svgd_per_group("leaf").init({"a": {"b": leaf}, "a.b": leaf})
    with pytest.raises(ValueError, match=r"layers at a/b and at a\.b would both be called 'a\.b'"):
        jsvgd.scale_by_svgd_per_group().init({"a": {"b": {"w": leaf}}, "a.b": {"w": leaf}})
    with pytest.raises(ValueError, match="groups must be .* got 'block'"):
        jsvgd.scale_by_svgd_per_group("block")
    with pytest.raises(TypeError, match="groups must be .* got int"):
        jsvgd.scale_by_svgd_per_group(3)
    particles = particle_tree()
    transform = jsvgd.scale_by_svgd_per_group()
    with pytest.raises(ValueError, match="needs the particles"):
        transform.update(particles, transform.init(particles))
    with pytest.raises(ValueError, match="updates must have the structure of params"):
        transform.update({}, transform.init(particles), particles)


def test_in_many_dimensions_a_kernel_a_layer_keeps_more_spread():
    """On N(0, I_80) in layers of 4: the median rule collapses over 80 dimensions, not over 4."""
    particles = {
        f"layer{i}": {"w": np.random.default_rng(i).normal(size=(30, 4)).astype(np.float32)}
        for i in range(20)
    }
    log_density = lambda p: -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))
    variances = {}
    for groups in (None, "layer"):
        sampler = jsvgd.svgd(log_density, optax.sgd(0.3), groups=groups)
        state, history = jsvgd.run(jax.random.key(0), sampler, sampler.init(particles), 300)
        variances[groups] = matrix(state.particles).var(axis=0).mean()
        assert int(history.info.num_nonfinite[-1]) == 0
    assert variances[None] < 0.25
    assert variances["layer"] > 0.6
