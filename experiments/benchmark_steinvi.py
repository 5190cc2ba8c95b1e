"""Liu and Wang's Bayesian network in jsvgd and in NumPyro's SteinVI: time a step, and test metrics.

    python -m experiments.benchmark_steinvi                  # concrete, five random splits

One model, one set of first particles a split, one optimiser and one bandwidth rule (NumPyro's). NumPyro
runs in three ways: ``SteinVI`` with point masses as components (``AutoDelta``) and its default of ten draws a
gradient; its subclass ``SVGD``, which takes one; and ``plate``, that is ``SVGD`` drawing its minibatches
itself, in ``numpyro.plate(..., subsample_size=...)``, as its users write it: then every pair of particles
gets a gradient of its own, N^2 a step. The first two are handed jsvgd's minibatches in its order, in a loop
compiled here. All make the same number of steps. In all the repulsion is N times weaker than in Liu and
Wang's paper: NumPyro sums the attraction over the particles and averages the repulsion; --repulsion scales
that up. The last lines say against which of them a step takes at most a third of the time at equal metrics.

On a CPU jsvgd differentiates the networks one after the other (--score-batch 1): their activations then
stay in the cache.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jsvgd
import jsvgd.flax
from experiments.command_line import InputError, Parser, integer, positive, run_script
from experiments.liu_wang_network import (
    Experiment,
    adagrad_with_decay,
    evaluate,
    fit_noise,
    init_particles,
    prepare,
)
from experiments.regression_data import load_concrete, load_uci, random_split, standardise
from jsvgd.batches import batch_chooser

__all__ = ["main"]

PLATE = "NumPyro plate"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ``arguments`` are those of the process where None."""
    options = _parse(arguments)
    if options.data is None:
        data = load_concrete()
        splits = [random_split(len(data.targets), seed) for seed in range(options.splits)]
    else:
        data, splits = load_uci(options.data)
        splits = splits[: options.splits]
    prepared = [standardise(data, split) for split in splits]
    rows = len(prepared[0].train[1])
    experiment = prepare(
        data.inputs.shape[1],
        rows,
        num_particles=options.particles,
        num_steps=options.steps,
        batch_size=options.batch,
        learning_rate=options.learning_rate,
    )
    sampler = jsvgd.svgd(
        jsvgd.flax.log_posterior(experiment.network.apply, data_size=rows),
        adagrad_with_decay(options.learning_rate),
        bandwidth="numpyro",
        score_batch_size=options.score_batch,
    )
    experiment = experiment._replace(sampler=sampler)
    advance = {"jsvgd": _jsvgd(experiment)}
    for kind in options.numpyro:
        advance[f"NumPyro {kind}"] = _numpyro(kind, experiment, options, prepared[0])
    first = init_particles(
        experiment.network, options.particles, jax.random.key(0), prepared[0].train
    )
    dimension = sum(leaf.size for leaf in jax.tree.leaves(first)) // options.particles
    print(
        f"{data.name}: {rows} rows to train on, {len(splits)} splits; {options.particles} particles "
        f"of {dimension} numbers, batch {options.batch}, {options.steps} steps; "
        f"JAX {jax.__version__} on {jax.devices()[0].device_kind}"
    )
    ratios = _compare_times(advance, first, prepared[0], options)
    apart = _compare_metrics(advance, experiment, prepared, options)
    for name in advance:
        if name != "jsvgd":
            print(_verdict(name, ratios[name], apart[name]))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m experiments.benchmark_steinvi",
        description="Time a step and test metrics of jsvgd and of NumPyro's SteinVI on one network.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", metavar="DIR", help="folder of a UCI set with splits (absent: concrete)")
    add("--splits", type=integer(2), default=5, help="splits to train on")
    add("--particles", type=integer(2), default=20, help="networks")
    add("--steps", type=integer(1), default=2000, help="steps a split")
    add("--batch", type=integer(1), default=100, help="rows of a minibatch")
    add("--learning-rate", type=positive, default=1e-3, help="of AdaGrad with decay")
    add("--repulsion", type=positive, default=1.0, help="SteinVI's repulsion_temperature")
    kinds = ["SteinVI", "SVGD", "plate"]
    add("--numpyro", nargs="+", choices=kinds, default=kinds, help="what to run of NumPyro")
    add("--score-batch", type=integer(1), default=1, help="networks differentiated at a time")
    add("--timed-steps", type=integer(1), default=100, help="steps of a timed call")
    add("--repeats", type=integer(1), default=15, help="timed calls of each, in turn")
    return parser.parse_args(arguments)


def _jsvgd(experiment: Experiment):
    """``advance(key, particles, train, steps) -> particles``."""

    def advance(key, particles, train, steps):
        state = experiment.sampler.init(particles)
        state, _ = jsvgd.run(
            key,
            experiment.sampler,
            state,
            steps,
            data=train,
            batch_size=experiment.batch_size,
            every=steps,
        )
        return state.particles

    return advance


def _numpyro(kind: str, experiment: Experiment, options, data):
    try:
        import numpyro
        import numpyro.distributions as dist
        from numpyro.contrib.einstein import SVGD, RBFKernel, SteinVI
        from numpyro.infer.autoguide import AutoDelta
    except ImportError as error:
        raise InputError(f"NumPyro is needed: pip install numpyro ({error})") from error

    structure, shapes = _sites(experiment)
    log_gamma = dist.TransformedDistribution(
        dist.Gamma(1.0, 0.1), dist.transforms.ExpTransform().inv
    )
    train_rows = len(data.train[1])

    def model(inputs, targets):
        log_noise = numpyro.sample("likelihood", log_gamma)
        log_precision = numpyro.sample("prior", log_gamma)
        sd = jnp.exp(-0.5 * log_precision)
        leaves = [
            numpyro.sample(name, dist.Normal(0.0, sd).expand(shape).to_event(len(shape)))
            for name, shape in shapes.items()
        ]
        params = jax.tree.unflatten(structure, leaves)
        if kind == "plate":
            with numpyro.plate("rows", train_rows, subsample_size=options.batch):
                inputs = numpyro.subsample(inputs, event_dim=1)
                observe(params, log_noise, inputs, numpyro.subsample(targets, event_dim=0))
        else:
            scale = numpyro.handlers.scale(scale=train_rows / len(targets))
            with scale, numpyro.plate("rows", len(targets)):
                observe(params, log_noise, inputs, targets)

    def observe(params, log_noise, inputs, targets):
        mean = experiment.network.apply(params, inputs)
        numpyro.sample("y", dist.Normal(mean, jnp.exp(-0.5 * log_noise)), obs=targets)

    optimizer = numpyro.optim.optax_to_numpyro(adagrad_with_decay(options.learning_rate))
    common = (optimizer, RBFKernel(), options.particles)
    is_svgd = kind in ("SVGD", "plate")
    stein = SVGD(model, *common) if is_svgd else SteinVI(model, AutoDelta(model), *common)
    rows = train_rows if kind == "plate" else options.batch
    batch = jax.tree.map(lambda a: jnp.asarray(a[:rows]), data.train)
    template = stein.init(jax.random.key(0), *batch)
    template = template._replace(repulsion_temperature=options.repulsion)

    @functools.partial(jax.jit, static_argnums=3)
    def advance(key, particles, train, steps):
        leaves = [*jax.tree.leaves(particles.params), particles.likelihood, particles.prior]
        names = [*shapes, "likelihood", "prior"]
        params = {f"{name}_auto_loc": leaf for name, leaf in zip(names, leaves, strict=True)}
        state = template._replace(optim_state=optimizer.init(params), rng_key=key)
        _, order_key = jax.random.split(key)
        order_at, choose = batch_chooser(options.batch, order_key, train, jnp.int32(0))

        def step(i, carry):
            state, order = carry
            (rows,), order = choose(i, order)
            return stein.update(state, *(train if kind == "plate" else rows))[0], order

        state, _ = jax.lax.fori_loop(0, steps, step, (state, order_at(jnp.int32(0))))
        params = stein.get_params(state)
        found = [params[f"{name}_auto_loc"] for name in names]
        return jsvgd.flax.Position(jax.tree.unflatten(structure, found[:-2]), *found[-2:])

    return advance


def _sites(experiment: Experiment):
    params = jax.eval_shape(experiment.network.init, jax.random.key(0))
    leaves, structure = jax.tree.flatten(params)
    return structure, {f"w{i}": leaf.shape for i, leaf in enumerate(leaves)}


def _compare_times(advance, first, data, options) -> dict[str, float]:
    """jsvgd's time a step over that of each."""
    train = jax.tree.map(jnp.asarray, data.train)
    steps = options.timed_steps
    seconds: dict[str, list[float]] = {name: [] for name in advance}
    for repeat in range(options.repeats + 1):  # the first one compiles
        for name, function in advance.items():
            if name == PLATE and repeat > 3:
                continue
            count = max(1, steps // 10) if name == PLATE else steps
            begin = time.perf_counter()
            jax.block_until_ready(function(jax.random.key(repeat), first, train, count))
            seconds[name].append(1e3 * (time.perf_counter() - begin) / count)
    # The least time is what other processes on the machine disturb least.
    least = {name: min(times[1:]) for name, times in seconds.items()}
    for name, times in seconds.items():
        print(
            f"{name:<16} {least[name]:8.3f} ms a step, the median {statistics.median(times[1:]):.3f} "
            f"(of {len(times) - 1} calls); jsvgd takes "
            f"{least['jsvgd'] / least[name]:.2f} of it"
        )
    return {name: least["jsvgd"] / time for name, time in least.items()}


def _compare_metrics(advance, experiment, prepared, options) -> dict[str, float]:
    """How many standard errors of the splits each is from jsvgd, in the metric that differs more."""
    metrics: dict[str, list] = {name: [] for name in advance}
    for i, data in enumerate(prepared):
        init_key, run_key = jax.random.split(jax.random.fold_in(jax.random.key(1), i))
        first = init_particles(experiment.network, options.particles, init_key, data.train)
        train = jax.tree.map(jnp.asarray, data.train)
        for name, function in advance.items():
            particles = function(run_key, first, train, options.steps)
            particles = fit_noise(experiment.network, particles, data.held_out)
            outcome = evaluate(experiment, particles, data)
            metrics[name].append((outcome.rmse, outcome.log_likelihood))
    ours = np.array(metrics["jsvgd"])
    apart: dict[str, float] = {}
    for j, what in enumerate(("test RMSE", "test log-likelihood")):
        for name, values in metrics.items():
            theirs = np.array(values)
            mean, error = _mean_and_error(theirs[:, j])
            both = math.hypot(error, _mean_and_error(ours[:, j])[1])
            difference = ours[:, j] - theirs[:, j]
            errors = abs(difference.mean()) / both
            apart[name] = max(apart.get(name, 0.0), errors)
            print(
                f"{what:<20} {name:<16} {mean:8.3f} ± {error:.3f}, jsvgd differs by "
                f"{difference.mean():+.4f}, {errors:.2f} standard errors "
                f"(split by split ± {_mean_and_error(difference)[1]:.4f})"
            )
    return apart


def _verdict(name: str, ratio: float, apart: float) -> str:
    """Whether a step takes at most a third of the time, and the metrics agree within two errors."""
    metrics = "agree" if apart <= 2 else "DIFFER"
    met = "met" if ratio <= 1 / 3 and apart <= 2 else "not met"
    return (
        f"a third of the time at equal metrics, against {name}: {met} (jsvgd takes {ratio:.3f} of its "
        f"time; metrics {metrics}, at most {apart:.2f} standard errors apart)"
    )


def _mean_and_error(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


if __name__ == "__main__":
    run_script(main)
