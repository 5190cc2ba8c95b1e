"""Bayesian networks of Flax NNX and Linen modules: particles, log posteriors, predictives.

Imported on its own, ``import jsvgd.flax``: ``import jsvgd`` does not import Flax.

    network = jsvgd.flax.functional(functools.partial(MLP, 8, 50))
    params = jsvgd.flax.init_particles(key, network, 20)
    particles = jsvgd.flax.init_positions(other_key, params)
    sampler = jsvgd.svgd(jsvgd.flax.log_posterior(network.apply, data_size=len(y)), optax.adam(1e-2))
    state, _ = jsvgd.run(key, sampler, sampler.init(particles), 2000, data=(x, y), batch_size=100)
    jsvgd.flax.predict(network.apply, state.particles, x_new).mean
"""

from jsvgd.flax.log_posterior import (
    Likelihood,
    Position,
    Prior,
    gaussian_likelihood,
    init_positions,
    log_posterior,
    normal_prior,
)
from jsvgd.flax.particles import Network, functional, init_particles
from jsvgd.flax.predictive import Prediction, log_predictive_density, predict

__all__ = [
    "Likelihood",
    "Network",
    "Position",
    "Prediction",
    "Prior",
    "functional",
    "gaussian_likelihood",
    "init_particles",
    "init_positions",
    "log_posterior",
    "log_predictive_density",
    "normal_prior",
    "predict",
]
