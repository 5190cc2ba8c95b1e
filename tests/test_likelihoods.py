"""Likelihoods and priors of networks against SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import jsvgd
import jsvgd.flax
from jsvgd.flax import Position
from tests.networks import PARAMS

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
