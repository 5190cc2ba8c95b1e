"""Bayesian networks of Flax NNX and Linen modules: particles, log posteriors, predictives.

Imported on its own, ``import jsvgd.flax``: ``import jsvgd`` does not import Flax.

    network = jsvgd.flax.functional(functools.partial(MLP, 8, 50))
    params = jsvgd.flax.init_particles(key, network, 20)
    particles = jsvgd.flax.init_positions(other_key, params)
    sampler = jsvgd.svgd(jsvgd.flax.log_posterior(network.apply, data_size=len(y)), optax.adam(1e-2))
    state, _ = jsvgd.run(key, sampler, sampler.init(particles), 2000, data=(x, y), batch_size=100)
    jsvgd.flax.predict(network.apply, state.particles, x_new).mean
"""

from jsvgd.flax.likelihoods import (
    Likelihood,
    bernoulli_likelihood,
    categorical_likelihood,
    fixed_gaussian_likelihood,
    gaussian_likelihood,
    heteroscedastic_likelihood,
    poisson_likelihood,
)
from jsvgd.flax.log_posterior import Position, init_positions, log_posterior
from jsvgd.flax.particles import Network, functional, init_particles, particles_from_models
from jsvgd.flax.predictive import (
    Prediction,
    class_probabilities,
    log_predictive_density,
    predict,
)
from jsvgd.flax.priors import (
    Prior,
    fixed_normal_prior,
    horseshoe_prior,
    laplace_prior,
    normal_prior,
    per_layer_prior,
)

__all__ = [
    "Likelihood",
    "Network",
    "Position",
    "Prediction",
    "Prior",
    "bernoulli_likelihood",
    "categorical_likelihood",
    "class_probabilities",
    "fixed_gaussian_likelihood",
    "fixed_normal_prior",
    "functional",
    "gaussian_likelihood",
    "heteroscedastic_likelihood",
    "horseshoe_prior",
    "init_particles",
    "init_positions",
    "laplace_prior",
    "log_posterior",
    "log_predictive_density",
    "normal_prior",
    "particles_from_models",
    "per_layer_prior",
    "poisson_likelihood",
    "predict",
]
