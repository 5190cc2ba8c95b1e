"""Time and memory of the exact median bandwidth beside the median by sorting, over N and d.

    python -m experiments.benchmark_bandwidth [--quick] [--output DIR]

Particles N(0, I). "jsvgd" is ``median_bandwidth``, "sort" is ``jnp.median`` of the N x N matrix of
squared distances (a matrix product, then XLA's sort), left out above --largest-sort particles. "with
gradient" is ``value_and_grad``. On a GPU "xla" is ``median_bandwidth`` with
``implementation="xla"``. Times are medians of three compiled loops in this one run; memory is the
arguments, results and scratch of the compiled program. A whole step (median, direction, update)
stands beside BlackJAX's where that is installed. Prints a table, writes benchmark_bandwidth.json
and a picture.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import math
import platform
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future

import jax
import jax.numpy as jnp

import jsvgd
from experiments.benchmark_peers import MOST_IN_BLACKJAX
from experiments.command_line import Parser, integer, output_folder, require, run_script
from experiments.timing import compiled_loop, prepare, seconds_of_loop

__all__ = ["main", "measure", "measure_step", "prepare_case", "prepare_step"]

GROWTH = {
    "cpu": [(100, 50), (300, 50), (1000, 50), (3000, 50), (10_000, 50), (20_000, 10)],
    "gpu": [(1024, 64), (4096, 64), (16_384, 64), (65_536, 64)],
}
DIMENSIONS = {
    "cpu": [(1000, 2), (1000, 8), (1000, 200), (1000, 1000)],
    "gpu": [(4096, 2), (4096, 256)],
}
STEPS = {"cpu": [(100, 50), (1000, 50), (3000, 50)], "gpu": [(1024, 32), (4096, 64), (16_384, 64)]}
QUICK = [(64, 2), (200, 20)]


def median_by_sort(x: jax.Array) -> jax.Array:
    """What one writes without a library; its even-length median is the mean of the middle two."""
    x = x - jnp.mean(x, axis=0)
    norms = jnp.sum(x * x, axis=1)
    products = jnp.matmul(x, x.T, precision=jax.lax.Precision.HIGHEST)
    squared = jnp.maximum(norms[:, None] + norms[None] - 2 * products, 0)
    return jnp.maximum(jnp.median(squared), 1e-5) / max(math.log(x.shape[0]), 1.0)


def value_and_gradient(x: jax.Array) -> jax.Array:
    """h and its gradient, folded into one array so that neither can be left out."""
    h, gradient = jax.value_and_grad(jsvgd.median_bandwidth)(x)
    return gradient + h


def prepare_case(pool: Executor, n: int, d: int, *, largest_sort: int) -> dict[str, Future]:
    """Each way to the bandwidth of n particles in d dimensions: futures of `Prepared`."""
    x = jax.random.normal(jax.random.key(0), (n, d))
    on_gpu = jax.default_backend() == "gpu"
    ways = {"jsvgd": jsvgd.median_bandwidth, "with gradient": value_and_gradient}
    if on_gpu:
        ways["xla"] = functools.partial(jsvgd.median_bandwidth, implementation="xla")
    if n <= largest_sort:
        ways["sort"] = median_by_sort
    short = on_gpu and n <= 4096
    return {name: pool.submit(prepare, way, x, short=short) for name, way in ways.items()}


def measure(n: int, d: int, prepared: dict[str, Future]) -> list[dict]:
    """One row for each way."""
    rows = []
    for name, future in prepared.items():
        way = future.result()
        value = float(jnp.ravel(way())[0])
        row = {"name": name, "n": n, "d": d, "milliseconds": 1e3 * way.seconds()}
        row["bytes"] = way.bytes
        rows.append(row | ({"bandwidth": value} if name != "with gradient" else {}))
    return rows


def prepare_step(n: int, d: int) -> dict[str, tuple]:
    """Loops of whole steps and their states: jsvgd's, and BlackJAX's where it is installed and compiles."""
    x = jax.random.normal(jax.random.key(0), (n, d))

    def update(x):
        return jsvgd.svgd_update(x, -x, jsvgd.median_bandwidth(x), 1e-3)

    loops = {"jsvgd step": (compiled_loop(update, x), x)}
    if n > MOST_IN_BLACKJAX:
        return loops
    try:
        import blackjax
        import optax
    except ImportError:
        print("BlackJAX is not installed: its step is not measured")
        return loops
    algorithm = blackjax.svgd(lambda p: -p, optax.sgd(1e-6))

    def step(state):  # all of the state, or its median would be left out as unused
        return algorithm.step(state._replace(kernel_parameters=dict(state.kernel_parameters)))

    state = algorithm.init(x)
    return loops | {"BlackJAX step": (compiled_loop(step, state), state)}


def measure_step(n: int, d: int, loops: dict[str, tuple]) -> list[dict]:
    """One row for each library."""
    return [
        {"name": name, "n": n, "d": d, "milliseconds": 1e3 * seconds_of_loop(loop, state)}
        for name, (loop, state) in loops.items()
    ]


def describe(row: dict, rows: list[dict]) -> str:
    """A line of the table."""
    text = f"{row['n']:6d} x {row['d']:<5d} {row['name']:14s} {row['milliseconds']:10.3f} ms"
    own = {"sort": "jsvgd", "xla": "jsvgd", "BlackJAX step": "jsvgd step"}.get(row["name"])
    for other in rows:
        if own == other["name"] and (other["n"], other["d"]) == (row["n"], row["d"]):
            text += f"  {row['milliseconds'] / other['milliseconds']:6.1f}x"
            if "bandwidth" in other:
                difference = abs(row["bandwidth"] / other["bandwidth"] - 1)
                text += f"  relative difference {difference:.0e}"
    if "bytes" in row:
        text += f"  {row['bytes'] / 1e6:8.1f} MB"
    return text


def main(arguments: Sequence[str] | None = None) -> list[dict]:
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog=None
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does the script run?")
    parser.add_argument(
        "--largest-sort",
        type=integer(0),
        default=None,
        help="most particles sorted (default: 3000 on the CPU, 16384 on a GPU)",
    )
    parser.add_argument("--output", default="output/benchmark_bandwidth")
    options = parser.parse_args(arguments)
    require("matplotlib")
    folder = output_folder(options.output)
    device = jax.devices()[0]
    kind = "gpu" if device.platform == "gpu" else "cpu"
    largest_sort = options.largest_sort
    if largest_sort is None:
        largest_sort = 16_384 if kind == "gpu" else 3000
    rows: list[dict] = []
    report = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m experiments.benchmark_bandwidth",
        "rows": rows,
    }

    def add(new: list[dict]) -> None:
        for row in new:
            rows.append(row)
        for row in new:
            print(describe(row, rows), flush=True)
        (folder / "benchmark_bandwidth.json").write_text(json.dumps(report, indent=1))

    cases = QUICK if options.quick else GROWTH[kind] + DIMENSIONS[kind]
    steps = QUICK if options.quick else STEPS[kind]
    with concurrent.futures.ThreadPoolExecutor() as pool:  # compiling takes most of the time
        compiling = [prepare_case(pool, *case, largest_sort=largest_sort) for case in cases]
        compiling_steps = [pool.submit(prepare_step, *case) for case in steps]
    for case, prepared in zip(cases, compiling, strict=True):
        add(measure(*case, prepared))
    for case, future in zip(steps, compiling_steps, strict=True):
        add(measure_step(*case, future.result()))
    _draw(folder / "benchmark_bandwidth.png", rows, f"{report['device']}, JAX {report['jax']}")
    print(f"{report['device']}, JAX {report['jax']}: written to {folder}")
    return rows


def _draw(path, rows, title):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    d = max({row["d"] for row in rows}, key=lambda d: len({r["n"] for r in rows if r["d"] == d}))
    styles = {
        "jsvgd": ("#2c6fad", "o"),
        "with gradient": ("#7fb2dd", "^"),
        "xla": ("#7d8a5c", "v"),
        "sort": ("#c0392b", "s"),
    }
    for name, (color, marker) in styles.items():
        points = sorted(
            (row["n"], row["milliseconds"], row["bytes"] / 1e6)
            for row in rows
            if row["name"] == name and row["d"] == d
        )
        if not points:
            continue
        for axis, column in zip(axes, (1, 2), strict=True):
            axis.loglog(
                [p[0] for p in points],
                [p[column] for p in points],
                marker=marker,
                color=color,
                label=name,
            )
    axes[0].set(xlabel="particles N", ylabel="milliseconds", title=f"time, d = {d}")
    axes[1].set(xlabel="particles N", ylabel="MB", title=f"memory, d = {d}")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    figure.suptitle(f"The median bandwidth, exact: {title}")
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    run_script(main)
