"""Means, standard deviations and shapes of posteriors: ``jsvgd.fit`` against rules and libraries.

    python -m experiments.posteriors --data FOLDER

prints a table, and writes ``posteriors.json`` (every run, with versions), ``posteriors.md`` (the table) and
``posteriors.png`` (ratios of standard deviations by method) into ``--output``; ``--add`` keeps the runs that
are there already. Folders of posteriordb hold ``data.json`` and ``reference_draws.npz``; without ``--data``
only the three analytic targets run.

tight: for every unconstrained parameter the mean is off by less than 0.1 reference sd and the sd ratio
lies in [0.9, 1.1]; loose: 0.2 and [0.8, 1.2]. "parameters": the same figures for the parameters as the model
has them (tau instead of log tau). W1 is the largest marginal Wasserstein-1 distance to the reference draws,
in reference sds, of the unconstrained parameters; beside it the median of that for as many independent
reference draws.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.command_line import (
    InputError,
    Parser,
    integer,
    output_folder,
    require,
    run_script,
)
from experiments.posterior_methods import METHODS, PEERS, Draws, run_fit
from experiments.posterior_models import MODELS, Target, analytic_targets, load_posterior

__all__ = ["Run", "independent_w1", "main", "measure"]

BANANA_STEPS = 4000


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of one method: errors in reference sds, ratios of sds."""

    target: str
    method: str
    start: str
    n: int
    seed: int
    steps: int
    seconds: float
    mean_error: float
    smallest_sd: float
    largest_sd: float
    parameter_mean_error: float
    parameter_smallest_sd: float
    parameter_largest_sd: float
    w1: float
    w1_independent: float
    verdict: str

    @property
    def tight(self) -> bool:
        return self.mean_error < 0.1 and self.smallest_sd > 0.9 and self.largest_sd < 1.1

    @property
    def loose(self) -> bool:
        return self.mean_error < 0.2 and self.smallest_sd > 0.8 and self.largest_sd < 1.2


def _errors(values, reference, mean=None, sd=None):
    mean = reference.mean(0) if mean is None else mean
    sd = reference.std(0, ddof=1) if sd is None else sd
    ratios = values.std(0, ddof=1) / sd
    return [float(a) for a in (np.max(np.abs(values.mean(0) - mean) / sd), *_ends(ratios))]


def _ends(a):
    return np.min(a), np.max(a)


def worst_w1(values: np.ndarray, reference: np.ndarray) -> float:
    """Largest marginal Wasserstein-1 distance, in reference sds."""
    stats = require("scipy.stats")
    sds = reference.std(0, ddof=1)
    columns = range(reference.shape[1])
    return max(stats.wasserstein_distance(values[:, c], reference[:, c]) / sds[c] for c in columns)


def independent_w1(target: Target, n: int, repeats: int = 20) -> float:
    """Median ``worst_w1`` of n independent reference draws, with replacement where there are fewer."""
    rng = np.random.default_rng(0)
    u = target.unconstrained_draws
    choices = [rng.choice(len(u), n, replace=n > len(u)) for _ in range(repeats)]
    return float(np.median([worst_w1(u[chosen], u) for chosen in choices]))


def measure(target: Target, method: str, draws: Draws, *, start, n, seed, independent) -> Run:
    """The figures of a run."""
    values = np.asarray(draws.values, np.float64)
    parameters = np.asarray(jax.vmap(target.constrain)(jnp.asarray(draws.values)), np.float64)
    analytic = target.draws is target.unconstrained_draws
    known = (target.mean, target.sd) if analytic else (None, None)
    return Run(
        target.name,
        method,
        start,
        n,
        seed,
        draws.steps,
        round(draws.seconds, 3),
        *_errors(values, target.unconstrained_draws, *known),
        *_errors(parameters, target.draws, target.mean, target.sd),
        worst_w1(values, target.unconstrained_draws),
        independent,
        draws.verdict,
    )


def _starting_points(n, d, seed, start) -> jax.Array:
    location, scale = START[start]
    rng = np.random.default_rng(seed)
    dtype = jnp.result_type(float)
    return jnp.asarray(location + scale * rng.normal(size=(n, d)), dtype)


START = {"N(0, 1)": (0.0, 1.0), "N(0, 9)": (0.0, 3.0), "N(5, 1)": (5.0, 1.0)}


def _runs(target: Target, arguments):
    """All runs of a target, one at a time."""
    independent = {}

    def figures(method, draws, start, n, seed):
        if n not in independent:
            independent[n] = independent_w1(target, n)
        return measure(
            target, method, draws, start=start, n=n, seed=seed, independent=independent[n]
        )

    starts = START if arguments.starts else ["N(0, 1)"]
    for n, steps in arguments.sizes:
        if target.name == "banana":
            steps = max(steps, BANANA_STEPS)
        for start in starts if n == arguments.sizes[0][0] else ["N(0, 1)"]:
            for seed in range(arguments.seeds if n <= 500 else 1):
                x = _starting_points(n, target.dimension, seed, start)
                draws = run_fit(target, seed, x, steps)
                yield figures("jsvgd.fit", draws, start, n, seed)
                if n != arguments.sizes[0][0] or start != "N(0, 1)":
                    continue
                others = dict(METHODS) if arguments.methods else {}
                others |= PEERS if arguments.peers else {}
                for name, method in others.items():
                    try:
                        made = method(target, seed, x, draws.seconds)
                    except ImportError as error:
                        print(f"  {name}: left out ({error})")
                        continue
                    yield figures(name, made, start, n, seed)


def _table(runs: list[Run]) -> str:
    """Worst figures over the seeds, one line a target, method, start and size."""
    lines = [
        "| target | method | start | n | steps | mean error | sd ratio | parameters: error, sd ratio "
        "| W1 (independent) | tight | loose | s |",
        "|" + "---|" * 12,
    ]
    groups = {}
    for run in runs:
        groups.setdefault((run.target, run.method, run.start, run.n), []).append(run)
    for (target, method, start, n), group in groups.items():
        worst = [max(getattr(r, name) for r in group) for name in ("mean_error", "largest_sd")]
        parameter = [
            max(getattr(r, name) for r in group)
            for name in ("parameter_mean_error", "parameter_largest_sd")
        ]
        lines.append(
            f"| {target} | {method} | {start} | {n} | {group[0].steps} | {worst[0]:.3f} "
            f"| {min(r.smallest_sd for r in group):.3f} .. {worst[1]:.3f} "
            f"| {parameter[0]:.3f}, {min(r.parameter_smallest_sd for r in group):.3f} .. "
            f"{parameter[1]:.3f} "
            f"| {max(r.w1 for r in group):.3f} ({group[0].w1_independent:.3f}) "
            f"| {sum(r.tight for r in group)}/{len(group)} | {sum(r.loose for r in group)}/{len(group)} "
            f"| {np.median([r.seconds for r in group]):.2f} |"
        )
    return "\n".join(lines)


def _picture(runs: list[Run], path: Path, n: int) -> None:
    require("matplotlib").use("Agg")
    plt = require("matplotlib.pyplot")
    runs = [run for run in runs if run.n == n and run.start == "N(0, 1)"]
    methods = list(dict.fromkeys(run.method for run in runs))
    targets = list(dict.fromkeys(run.target for run in runs))
    figure, axes = plt.subplots(figsize=(9, 1 + 0.6 * len(methods)), layout="constrained")
    colours = plt.get_cmap("tab10")
    for row, method in enumerate(methods):
        for column, target in enumerate(targets):
            group = [run for run in runs if (run.method, run.target) == (method, target)]
            if not group:
                continue
            low, high = min(r.smallest_sd for r in group), max(r.largest_sd for r in group)
            place = row + 0.7 * (column / max(1, len(targets) - 1) - 0.5)
            label = target if row == 0 else None
            axes.plot([low, high], [place, place], "|-", color=colours(column), label=label)
    axes.axvspan(0.9, 1.1, color="0.9")
    axes.axvline(1, color="0.5", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(0.05, 20)
    ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10]
    axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.set_yticks(range(len(methods)), methods)
    axes.invert_yaxis()
    axes.set_xlabel(f"standard deviation of the particles over the posterior's, n = {n}, all seeds")
    axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _kept(path: Path) -> tuple[dict, list[Run]]:
    """What a JSON of this script holds, and its runs."""
    try:
        record = json.loads(path.read_text())
        return record, [Run(**run) for run in record["runs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--add needs a {path} of this script: {error}") from error


def _merged(kept: list[Run], made: list[Run]) -> list[Run]:
    """Both, by target in the order of first appearance; a run that is made again replaces the kept one."""

    def key(run):
        return run.target, run.method, run.start, run.n, run.seed

    again = {key(run) for run in made}
    runs = [run for run in kept if key(run) not in again] + made
    order = list(dict.fromkeys(run.target for run in kept + made))
    return sorted(runs, key=lambda run: order.index(run.target))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": jax.default_backend()}
    found["device"] = jax.devices()[0].device_kind
    found["cores"] = str(os.cpu_count())
    found["dtype"] = str(jnp.result_type(float))
    for package in ("jax", "optax", "blackjax", "numpyro"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _sizes(text: str) -> list[tuple[int, int]]:
    sizes = []
    for part in text.split(","):
        n, _, steps = part.partition(":")
        sizes.append((integer(2)(n), integer(1)(steps)))
    return sizes


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m experiments.posteriors", description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="folder with the folders of posteriordb")
    parser.add_argument("--only", nargs="+", help="parts of the names of the targets to run")
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=[(100, 1000), (500, 4000)],
        help="particles:steps, comma separated (default 100:1000,500:4000)",
    )
    parser.add_argument("--seeds", type=integer(1), default=3)
    parser.add_argument("--float64", action="store_true")
    for name, what in (
        ("methods", "the vanilla rules"),
        ("peers", "BlackJAX and NumPyro"),
        ("starts", "starts at N(0, 9) and N(5, 1)"),
    ):
        parser.add_argument(f"--no-{name}", dest=name, action="store_false", help=f"without {what}")
    parser.add_argument("--output", default="results", help="folder of what is written")
    parser.add_argument("--name", default="posteriors", help="of the files written there")
    parser.add_argument(
        "--add", action="store_true", help="to the runs of the files that are there"
    )
    arguments = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", arguments.float64)
    targets = []
    if arguments.data is not None:
        targets = [load_posterior(arguments.data / name) for name in MODELS]
    targets += analytic_targets()
    if arguments.only:
        targets = [t for t in targets if any(part in t.name for part in arguments.only)]
        if not targets:
            raise InputError(f"--only {arguments.only} names no target")
    path = output_folder(arguments.output) / arguments.name
    record, kept = {"versions": _versions()}, []
    if arguments.add:
        record, kept = _kept(path.with_name(f"{path.name}.json"))
        sizes = "_".join(str(n) for n, _ in arguments.sizes)
        record = {**record, f"versions_{sizes}": _versions()}
    runs, made = kept, []
    for target in targets:
        for run in _runs(target, arguments):
            made.append(run)
            runs = _merged(kept, made)
            # After every run: large sizes take long, and a run that is stopped keeps what it has.
            record["runs"] = [dataclasses.asdict(run) for run in runs]
            path.with_name(f"{path.name}.json").write_text(json.dumps(record, indent=1) + "\n")
            print(
                f"{run.target} | {run.method} | {run.start} | n={run.n} seed {run.seed}: mean error "
                f"{run.mean_error:.3f}, sd {run.smallest_sd:.3f} .. {run.largest_sd:.3f}, W1 {run.w1:.3f} "
                f"({run.w1_independent:.3f}), {run.seconds:.2f} s {run.verdict}",
                flush=True,
            )
    table = _table(runs)
    print("\n" + table)
    path.with_name(f"{path.name}.md").write_text(table + "\n")
    _picture(runs, path.with_name(f"{path.name}.png"), runs[0].n)


if __name__ == "__main__":
    run_script(main)
