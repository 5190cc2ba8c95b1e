"""64 Bayesian networks of 100 000 parameters on scikit-learn's digits: one kernel, or one a layer.

    python -m experiments.digits                             # both kernels and a deep ensemble

All three start from the same networks and see the same minibatches. "ensemble" has no kernel: each network
follows its own gradient through the same optimiser, which is what the kernels have to beat.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jsvgd
import jsvgd.flax
from experiments.command_line import InputError, Parser, integer, positive, require, run_script
from jsvgd.transform import ScaleBySVGDState

__all__ = [
    "METHODS",
    "Digits",
    "ReluNetwork",
    "ensemble",
    "evaluate",
    "load_digits",
    "main",
    "train",
]

METHODS = ("ensemble", "global", "layer")


class ReluNetwork(nnx.Module):
    """Two hidden layers of 282 ReLU units on 64 pixels: 100 966 parameters."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 282, rngs=rngs)
        self.second = nnx.Linear(282, 282, rngs=rngs)
        self.output = nnx.Linear(282, 10, rngs=rngs)

    def __call__(self, pixels):
        return self.output(nnx.relu(self.second(nnx.relu(self.first(pixels)))))


class Digits(NamedTuple):
    """Pixels (R, 64) in [0, 1] and classes (R,), to train on and to test."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


class Outcome(NamedTuple):
    """Test accuracy, mean test log-likelihood, calibration error, spread, and seconds a step."""

    accuracy: float
    log_likelihood: float
    calibration_error: float
    disagreement: float
    seconds_a_step: float


def load_digits(num_train: int, seed: int) -> Digits:
    """A random split of scikit-learn's 1797 digits; few rows to train on leave something to doubt."""
    pixels, classes = require("sklearn.datasets").load_digits(return_X_y=True)
    if not 10 <= num_train <= len(classes) - 100:
        raise InputError(f"--train must be from 10 to {len(classes) - 100}, got {num_train}")
    pixels = (pixels / 16).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(classes))
    rows = order[:num_train], order[num_train:]
    return Digits(*((pixels[r], classes[r].astype(np.int32)) for r in rows))


def ensemble(log_density, optimizer, score_batch: int) -> jsvgd.SamplingAlgorithm:
    """A deep ensemble in the sampler's shape: networks that know nothing of each other."""

    def init(particles, rng_key=None):
        del rng_key
        no_kernel = ScaleBySVGDState(jnp.zeros((), jnp.int32), jnp.zeros(()))
        return jsvgd.SVGDState(particles, optimizer.init(particles), no_kernel)

    def step(rng_key, state, *args):
        del rng_key
        value_and_score = jax.value_and_grad(lambda position: log_density(position, *args))
        values, scores = jax.lax.map(value_and_score, state.particles, batch_size=score_batch)
        descent = jax.tree.map(jnp.negative, scores)
        updates, optimizer_state = optimizer.update(descent, state.optimizer_state, state.particles)
        particles = optax.apply_updates(state.particles, updates)
        squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(scores))
        finite = [
            jnp.all(jnp.isfinite(leaf.reshape(len(leaf), -1)), axis=1)
            for leaf in jax.tree.leaves(particles)
        ]
        norm = jnp.sqrt(squares / len(values))
        info = jsvgd.SVGDInfo(
            bandwidth=state.transform_state.bandwidth,
            direction_norm=norm,
            score_norm=norm,
            num_nonfinite=jnp.sum(~jnp.all(jnp.stack(finite), axis=0)).astype(jnp.int32),
            log_density=jnp.mean(values),
        )
        counted = state.transform_state._replace(count=state.step + 1)
        return jsvgd.SVGDState(particles, optimizer_state, counted), info

    return jsvgd.SamplingAlgorithm(init, step)


def train(method: str, network, particles, data: Digits, options, key):
    """The particles after training, and the seconds a step took, compilation left out."""
    likelihood = jsvgd.flax.categorical_likelihood()
    # N(0, 1) throughout. With the standard deviations of an initialisation, 1/sqrt(fan-in), the mode of
    # the posterior is the network of zeros: 100 000 weights weigh more than some hundred rows. Particles
    # in so many dimensions sit near modes.
    prior = jsvgd.flax.fixed_normal_prior(options.prior_sd)
    log_density = jsvgd.flax.log_posterior(
        network.apply, data_size=len(data.train[1]), likelihood=likelihood, prior=prior
    )
    schedule = optax.cosine_decay_schedule(options.learning_rate, options.steps)
    optimizer = optax.adam(schedule)
    if method == "ensemble":
        sampler = ensemble(log_density, optimizer, options.score_batch)
    else:
        sampler = jsvgd.svgd(
            log_density,
            optimizer,
            score_batch_size=options.score_batch,
            bandwidth=options.bandwidth,
            groups="layer" if method == "layer" else None,
        )
    state = sampler.init(
        jsvgd.flax.init_positions(key, particles, likelihood=likelihood, prior=prior)
    )
    batches = {"data": data.train, "batch_size": min(options.batch, len(data.train[1]))}
    first = min(2, options.steps)
    state, _ = jsvgd.run(key, sampler, state, first, every=100, **batches)  # compiles
    jax.block_until_ready(state)
    begin = time.perf_counter()
    state, history = jsvgd.run(
        key, sampler, state, options.steps - first, every=100, progress=options.progress, **batches
    )
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - begin) / max(options.steps - first, 1)
    if len(history.step) and int(history.info.num_nonfinite[-1]):
        raise InputError(f"{method}: particles are not finite; --learning-rate must be lower")
    return state.particles, seconds


def evaluate(network, particles, data: Digits, seconds: float) -> Outcome:
    """What the mixture of the networks predicts for the test rows."""
    pixels, classes = data.test
    categorical = jsvgd.flax.categorical_likelihood()

    @jax.jit
    def predict(particles, pixels, classes):
        probabilities = jsvgd.flax.class_probabilities(network.apply, particles, pixels)
        log_density = jsvgd.flax.log_predictive_density(
            network.apply, particles, pixels, classes, likelihood=categorical
        )
        spread = jsvgd.flax.predict(network.apply, particles, pixels, likelihood=categorical)
        return probabilities, log_density, jnp.sum(spread.epistemic_sd**2, axis=-1)

    parts = [
        predict(particles, pixels[i : i + 100], classes[i : i + 100])
        for i in range(0, len(classes), 100)
    ]
    probabilities, log_density, spread = (np.concatenate(p) for p in zip(*parts, strict=True))
    confidence, right = probabilities.max(1), probabilities.argmax(1) == classes
    bins = np.minimum((confidence * 10).astype(int), 9)
    gaps = [abs(np.sum(confidence[bins == b]) - np.sum(right[bins == b])) for b in range(10)]
    return Outcome(
        float(right.mean()),
        float(log_density.mean()),
        float(sum(gaps) / len(classes)),
        float(np.sqrt(spread.mean())),
        seconds,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ``arguments`` are those of the process where None."""
    options = _parse(arguments)
    network = jsvgd.flax.functional(ReluNetwork)
    size = sum(a.size for a in jax.tree.leaves(jax.eval_shape(network.init, jax.random.key(0))))
    print(
        f"{options.particles} networks of {size} parameters, {options.train} rows to train on, batch "
        f"{options.batch}, {options.steps} steps of Adam at {options.learning_rate:g} with cosine decay, "
        f"bandwidth rule {options.bandwidth}; JAX {jax.__version__} on {jax.devices()[0].device_kind}"
    )
    outcomes: dict[str, list[Outcome]] = {method: [] for method in options.methods}
    for seed in range(options.seed, options.seed + options.splits):
        data = load_digits(options.train, seed)
        init_key, run_key = jax.random.split(jax.random.key(seed))
        particles = jax.jit(lambda key: jsvgd.flax.init_particles(key, network, options.particles))(
            init_key
        )
        for method in options.methods:
            trained, seconds = train(method, network, particles, data, options, run_key)
            outcomes[method].append(evaluate(network, trained, data, seconds))
            shown = ", ".join(
                f"{name.replace('_', ' ')} {value:.4f}"
                for name, value in outcomes[method][-1]._asdict().items()
            )
            print(f"split {seed}, {method:<8} {shown}", flush=True)
    _compare(outcomes)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m experiments.digits",
        description="Bayesian networks on digits: one kernel, one a layer, or none.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--particles", type=integer(2), default=64, help="networks")
    add("--methods", nargs="+", choices=METHODS, default=METHODS, help="what to train")
    add("--steps", type=integer(1), default=300, help="steps")
    add("--batch", type=integer(1), default=100, help="rows of a minibatch")
    add("--train", type=integer(10), default=200, help="rows to train on; the others are the test")
    add("--learning-rate", type=positive, default=3e-3, help="of Adam")
    add("--prior-sd", type=positive, default=1.0, help="of every weight")
    add("--bandwidth", default="median", help="rule of both kernels")
    add("--score-batch", type=integer(1), default=1, help="networks differentiated at a time")
    add("--splits", type=integer(1), default=2, help="random splits")
    add("--seed", type=integer(0), default=0, help="of the first split")
    add("--progress", action="store_true", help="show a bar")
    return parser.parse_args(arguments)


def _compare(outcomes: dict[str, list[Outcome]]) -> None:
    print()
    for method, values in outcomes.items():
        means = Outcome(*np.mean(values, axis=0))
        print(
            f"{method:<8} accuracy {means.accuracy:.4f}, log-likelihood {means.log_likelihood:.4f}, "
            f"calibration error {means.calibration_error:.4f}, {means.seconds_a_step:.2f} s a step"
        )
    if not {"layer", "global"} <= outcomes.keys():
        return
    gain = [
        layer.log_likelihood - one.log_likelihood
        for layer, one in zip(outcomes["layer"], outcomes["global"], strict=True)
    ]
    verdict = "beats" if np.mean(gain) > 0 else "does not beat"
    print(f"a kernel a layer {verdict} one kernel, by {np.mean(gain):+.4f} in test log-likelihood")


if __name__ == "__main__":
    run_script(main)
