"""The Bayesian network of Liu and Wang (2016, section 5), as their ``bayesian_nn.py`` has it.

One hidden layer of ReLU units, Gamma(1, rate 0.1) priors on the noise and the weight precision,
AdaGrad with a decaying sum, the bandwidth med / (2 log(n + 1)), a tenth of the training rows held out
to set each particle's noise precision at the end. Minibatches alone differ: shuffled each epoch here,
taken in order there.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jsvgd
import jsvgd.flax
from experiments.command_line import InputError
from experiments.regression_data import Standardised

__all__ = [
    "Experiment",
    "Outcome",
    "ReluNetwork",
    "adagrad_with_decay",
    "evaluate",
    "prepare",
    "train",
]


class ReluNetwork(nnx.Module):
    """One hidden layer of ReLU units; weights N(0, 1 / (fan_in + 1)), biases 0."""

    def __init__(self, num_inputs: int, num_hidden: int, *, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, kernel_init=_normal_by_fan_in, rngs=rngs)
        self.hidden = linear(num_inputs, num_hidden)
        self.output = linear(num_hidden, 1)

    def __call__(self, inputs):
        return self.output(nnx.relu(self.hidden(inputs)))[..., 0]


def _normal_by_fan_in(key, shape, dtype=jnp.float32, out_sharding=None):
    del out_sharding
    return jax.random.normal(key, shape, dtype) / math.sqrt(shape[0] + 1)


class AdagradState(NamedTuple):
    """Steps made, and the decaying sum of squares in the structure of the parameters."""

    count: jax.Array
    squares: optax.Updates


def adagrad_with_decay(
    learning_rate: float, decay: float = 0.9, epsilon: float = 1e-6
) -> optax.GradientTransformation:
    """Liu and Wang's AdaGrad: G <- decay G + (1 - decay) g^2, step g / (epsilon + sqrt(G)).

    G starts as g^2 of the first step, undecayed; that is where it differs from ``optax.rmsprop``.
    """

    def init(params):
        return AdagradState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None):
        del params
        kept = jnp.where(state.count == 0, 0.0, decay)
        squares = jax.tree.map(lambda G, g: kept * G + (1 - kept) * g**2, state.squares, updates)
        updates = jax.tree.map(lambda G, g: g / (epsilon + jnp.sqrt(G)), squares, updates)
        return updates, AdagradState(state.count + 1, squares)

    return optax.chain(
        optax.GradientTransformation(init, update), optax.scale_by_learning_rate(learning_rate)
    )


class Experiment(NamedTuple):
    """What all splits of one data set share, so that the steps are compiled once."""

    network: jsvgd.flax.Network
    sampler: jsvgd.SamplingAlgorithm
    num_particles: int
    num_steps: int
    batch_size: int


class Outcome(NamedTuple):
    """One split: the particles, and what they predict for the test rows."""

    particles: jsvgd.flax.Position
    prediction: jsvgd.flax.Prediction
    probability: np.ndarray  # of a target at most as large as the one seen, (R,)
    rmse: float
    log_likelihood: float


def prepare(
    num_inputs: int,
    num_rows: int,
    *,
    num_particles: int = 20,
    num_hidden: int = 50,
    num_steps: int = 2000,
    batch_size: int = 100,
    learning_rate: float = 1e-3,
    implementation: str | None = None,
) -> Experiment:
    """The network and its sampler, for training sets of ``num_rows`` rows.

    Raises:
      InputError: where a batch is larger than the training set, and where the implementation does not
        run on this machine or for so many parameters.
    """
    if batch_size > num_rows:
        raise InputError(
            f"--batch must be at most the {num_rows} rows to train on, got {batch_size}"
        )
    network = jsvgd.flax.functional(functools.partial(ReluNetwork, num_inputs, num_hidden))
    if implementation is not None:
        _try_implementation(implementation, network, num_particles)
    sampler = jsvgd.svgd(
        jsvgd.flax.log_posterior(network.apply, data_size=num_rows),
        adagrad_with_decay(learning_rate),
        bandwidth="liu",
        implementation=implementation,
    )
    return Experiment(network, sampler, num_particles, num_steps, batch_size)


def _try_implementation(implementation: str, network: jsvgd.flax.Network, num_particles: int):
    params = jax.eval_shape(network.init, jax.random.key(0))
    dimension = sum(leaf.size for leaf in jax.tree.leaves(params)) + 2  # and two precisions
    zeros = jnp.zeros((num_particles, dimension))
    try:
        jsvgd.svgd_direction(zeros, zeros, 1.0, implementation=implementation)
    except (
        Exception
    ) as error:  # what a compiler raises for a kernel it cannot build has no one type
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"--implementation must be one that runs here for {num_particles} particles of "
            f"{dimension} parameters, got {implementation}: {reason}"
        ) from error


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_particles(network, n, rng_key, train) -> jsvgd.flax.Position:
    """Particles as Liu and Wang start them."""
    params_key, prior_key = jax.random.split(rng_key)
    params = jsvgd.flax.init_particles(params_key, network, n)
    # Their code passes the rate 0.1 as NumPy's scale: the weights start out wide.
    weight_precision = 0.1 * jax.random.gamma(prior_key, 1.0, (n,))
    particles = jsvgd.flax.Position(params, jnp.zeros(n), jnp.log(weight_precision))
    return fit_noise(network, particles, jax.tree.map(lambda a: a[:1000], train))


@functools.partial(jax.jit, static_argnums=0)
def fit_noise(network, particles, rows) -> jsvgd.flax.Position:
    """Each particle's noise precision set to the best one for its own residuals on ``rows``."""
    inputs, targets = rows
    outputs = jax.vmap(network.apply, (0, None))(particles.params, inputs)
    return particles._replace(likelihood=-jnp.log(jnp.mean((outputs - targets) ** 2, axis=1)))


def train(
    rng_key: jax.Array, experiment: Experiment, data: Standardised, *, progress: bool = False
) -> jsvgd.flax.Position:
    """The particles after the last step, their noise precisions reset on the rows held out.

    Raises:
      InputError: where particles have left the domain.
    """
    init_key, run_key = jax.random.split(rng_key)
    network, n = experiment.network, experiment.num_particles
    state, history = jsvgd.run(
        run_key,
        experiment.sampler,
        experiment.sampler.init(init_particles(network, n, init_key, data.train)),
        experiment.num_steps,
        data=data.train,
        batch_size=experiment.batch_size,
        progress=progress,
        every=20,
    )
    lost = int(history.info.num_nonfinite[-1])
    if lost:
        raise InputError(
            f"training diverged: {lost} of {n} particles are not finite; "
            "--learning-rate must be lower"
        )
    return fit_noise(network, state.particles, data.held_out)


@functools.partial(jax.jit, static_argnums=0)
def _predict(network, particles, inputs, targets, target_mean, target_scale):
    units = {"target_mean": target_mean, "target_scale": target_scale}
    prediction = jsvgd.flax.predict(network.apply, particles, inputs, **units)
    log_density = jsvgd.flax.log_predictive_density(
        network.apply, particles, inputs, targets, **units
    )
    means = jax.vmap(network.apply, (0, None))(particles.params, inputs)
    sds = jnp.exp(-0.5 * particles.likelihood)
    distance = ((targets - target_mean) / target_scale - means) / sds[:, None]
    return prediction, log_density, jnp.mean(jax.scipy.stats.norm.cdf(distance), axis=0)


def evaluate(experiment: Experiment, particles, data: Standardised) -> Outcome:
    """Predictions for the test rows and how good they are."""
    inputs, targets = data.test
    prediction, log_density, probability = _predict(
        experiment.network, particles, inputs, targets, data.target_mean, data.target_scale
    )
    error = np.asarray(prediction.mean, np.float64) - targets
    return Outcome(
        jax.tree.map(np.asarray, particles),
        jax.tree.map(np.asarray, prediction),
        np.asarray(probability),
        float(np.sqrt(np.mean(error**2))),
        float(np.mean(np.asarray(log_density, np.float64))),
    )
