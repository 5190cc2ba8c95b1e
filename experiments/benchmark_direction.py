"""Time, error and memory of the direction and its gradient beside what else a user could pick.

    python -m experiments.benchmark_direction [--quick] [--peers] [--output DIR]

Inputs N(0, I), scores -x + 0.1 noise, bandwidth about the median rule's. Every time is the median of three
loops (compiled ones for short calls) in this one run; ratios compare within the run. "error" is
||out - ref64|| / ||ref64|| and "termwise" max |out - ref64| / sum of the terms' magnitudes, on 128 rows
against the float64 oracle; for gradients the largest relative error of those in x and s (rows) and h.
Prints a table and writes benchmark_direction.json and a roofline picture into the output folder.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import platform
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jsvgd
from experiments.benchmark_peers import STEPS, baselines, measure_steps, prepare_steps
from experiments.benchmark_report import describe, picture
from experiments.timing import LONG, prepare
from jsvgd import dispatch, reference

ROWS = 128
# (work, chains, N, d)
WORK = [
    ("direction", 1, 1024, 32),
    ("direction", 1, 4096, 64),
    ("direction", 1, 16384, 64),
    ("direction", 1, 16384, 128),
    ("direction", 1, 16384, 256),
    ("direction", 1, 65536, 64),
    ("direction", 1, 65536, 4),
    ("direction", 1, 65536, 2),
    ("direction", 1, 64, 1_000_000),
    ("direction", 1, 1024, 65536),
    ("direction", 64, 256, 32),
    ("gradient", 1, 1024, 32),
    ("gradient", 1, 4096, 64),
    ("gradient", 1, 16384, 64),
    ("gradient", 1, 65536, 64),
    ("direction", 1, 1_048_576, 64),
]
QUICK = [
    ("direction", 1, 333, 7),
    ("direction", 5, 65, 3),
    ("gradient", 1, 333, 7),
    ("direction", 1, 20, 501),
]


def problem(chains, n, d, seed=0):
    """Particles, scores and cotangent (chains, N, d), or (N, d) for one chain, and the bandwidth."""
    shape = (n, d) if chains == 1 else (chains, n, d)
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], shape)
    s = -x + 0.1 * jax.random.normal(keys[1], shape)
    g = jax.random.normal(keys[2], shape)
    return x, s, g, jnp.float32(2 * d / max(math.log(n), 1.0))


def library(chains, implementation=None):
    def direction(x, s, h):
        return jsvgd.svgd_direction(x, s, h, implementation=implementation)

    return jax.vmap(direction, (0, 0, None)) if chains > 1 else direction


def gradients_of(direction):
    """Forward and backward: gradients of sum(g * direction) in x, s and h."""

    def gradients(x, s, g, h):
        value, vjp = jax.vjp(direction, x, s, h)
        # The forward pass is part of the work: a cotangent that depends on it keeps it alive.
        return vjp(g + 0 * value)

    return gradients


def exact_rows(x, s, h, rows=ROWS):
    """phi of the first rows of the first chain and the sum of its terms' magnitudes, float64."""
    x, s = (a[0] if a.ndim == 3 else a for a in (x, s))
    n, d = x.shape
    rows = min(rows, n)
    step = max(1, min(rows, (1 << 27) // (n * d)))
    with jax.enable_x64(True):
        x, s = (jnp.asarray(np.asarray(a), jnp.float64) for a in (x, s))
        h = jnp.float64(float(h))

        @jax.jit
        def block(y, x, s):
            difference = y[:, None, :] - x[None]
            k = jnp.exp(-jnp.sum(difference**2, -1) / (2 * h))
            terms = k @ jnp.abs(s) + jnp.sum(k[..., None] * jnp.abs(difference), 1) / h
            return reference.direction(x, s, h, queries=y), terms / n

        parts = [block(x[i : i + step], x, s) for i in range(0, rows, step)]
        return [
            np.concatenate([np.asarray(p) for p in column])[:rows]
            for column in zip(*parts, strict=True)
        ]


def exact_gradient_rows(x, s, g, h, rows=ROWS):
    """Gradients in x and s of the first rows, and in h, float64, in blocks of rows of the pair matrix."""
    with jax.enable_x64(True):
        x, s, g = (jnp.asarray(np.asarray(a), jnp.float64) for a in (x, s, g))
        h = jnp.float64(float(h))

        def value(head, head_s, h, x, s, g):
            # Only the pairs that the first rows take part in carry their gradient.
            x, s = x.at[:rows].set(head), s.at[:rows].set(head_s)
            total = jnp.sum(g * jsvgd.svgd_direction(x, s, h, implementation="xla"))
            return total

        dx, ds, dh = jax.jit(jax.grad(value, (0, 1, 2)))(x[:rows], s[:rows], h, x, s, g)
        return np.asarray(dx), np.asarray(ds), float(dh)


def relative(value, exact):
    value = np.asarray(value, np.float64)
    return float(np.linalg.norm(value - exact) / np.linalg.norm(exact))


def chosen_implementation(work, n, d):
    """What makes the direction, or the gradient."""
    return jsvgd.which_implementation(n, d, gradient=work == "gradient").implementation


def candidates(work, chains, n, d):
    """name -> direction: jsvgd's own choice, and XLA without a library."""
    return {"jsvgd": library(chains)} | baselines(chains, n, work)


def other_implementations(work, chains, n, d):
    """name -> direction: what jsvgd could have chosen."""
    chosen = chosen_implementation(work, n, d)
    named = {}
    for other in ("mosaic_gpu", "triton"):
        takes, _ = dispatch.supports(
            other, n, d, dtype=jnp.float32, kernel=jsvgd.RBF, precision="high"
        )
        if jax.default_backend() == "gpu" and takes and other != chosen and n <= 65536:
            named[f"jsvgd {other}"] = library(chains, other)
    return named


def prepare_case(pool, named, work, chains, n, d):
    """What will be compiled of the named directions.

    Returns:
      name -> future of what to call and time, or of the error that came instead.
    """
    x, s, g, h = problem(chains, n, d)
    short = 1e-3 * floor_milliseconds(work, chains, n, d) < LONG / 2

    def prepared(direction):
        try:
            if work == "gradient":
                return prepare(gradients_of(direction), x, s, g, h, short=short)
            return prepare(direction, x, s, h, short=short)
        except Exception as error:  # one case that fails must not lose the others' figures
            return error

    return {name: pool.submit(prepared, direction) for name, direction in named.items()}


def direction_errors(chains, n, d):
    """phi -> the two measures of its error, from the first rows."""
    x, s, _, h = problem(chains, n, d)
    exact, terms = exact_rows(x, s, h)

    def errors(out):
        assert bool(jnp.all(jnp.isfinite(out)))
        head = np.asarray((out[0] if chains > 1 else out)[: len(exact)], np.float64)
        termwise = float(np.max(np.abs(head - exact) / terms))
        return {"error": relative(head, exact), "termwise": termwise}

    return errors


def gradient_errors(chains, n, d):
    """Gradients -> the largest relative error of those in x, s (first rows) and h."""
    exact = exact_gradient_rows(*problem(chains, n, d))

    def errors(out):
        dx, ds, dh = out
        of_h = abs(float(dh) - exact[2]) / abs(exact[2])
        return {"error": max(relative(dx[:ROWS], exact[0]), relative(ds[:ROWS], exact[1]), of_h)}

    return errors


def measure(work, chains, n, d, prepared, report):
    make = direction_errors if work == "direction" else gradient_errors
    errors = make(chains, n, d)
    for name, case in prepared.items():
        try:
            if isinstance(case, Exception):
                raise case
            figures = errors(case())
            report(name, milliseconds=1e3 * case.seconds(), bytes=case.bytes, **figures)
        except Exception as error:
            print(
                f"{work} {chains}x{n}x{d} {name}: {type(error).__name__}: {error}"[:300], flush=True
            )
            report("failed", of=name, failure=str(error)[:300])


def floor_milliseconds(work, chains, n, d):
    """The larger of arithmetic and memory time on an H200: 802 TFLOP/s in bf16, three products; 4.3 TB/s."""
    products = 4 * n * n * d * (2.5 + 1 if work == "gradient" else 1) * 3 / 802e12
    exponentials = n * n / (132 * 16 * 1.98e9)
    traffic = 4 * n * d * 4 / 4.3e12
    return 1e3 * chains * max(products, exponentials, traffic)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny shapes: does the script run?")
    parser.add_argument("--peers", action="store_true", help="also PyTorch and BlackJAX")
    parser.add_argument("--output", type=Path, default=Path("output/benchmark_direction"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    device = jax.devices()[0]
    rows = []
    header = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m experiments.benchmark_direction"
        + (" --peers" if options.peers else ""),
        "rows": rows,
    }

    def report_for(work, chains, n, d):
        floor = floor_milliseconds(work, chains, n, d) if work != "step" else None

        def report(name, **figures):
            choice = chosen_implementation(work, n, d) if name == "jsvgd" else None
            row = {"work": work, "chains": chains, "n": n, "d": d, "name": name, "floor": floor}
            rows.append({**row, "implementation": choice, **figures})
            (options.output / "benchmark_direction.json").write_text(json.dumps(header, indent=1))
            if name != "failed":
                print(describe(rows[-1], rows), flush=True)

        return report

    cases = QUICK if options.quick else WORK
    steps = STEPS if options.peers else []
    # First what the kept table shows; a run that is cut short then lacks other implementations alone.
    for choose, steps_then in ((candidates, steps), (other_implementations, [])):
        with concurrent.futures.ThreadPoolExecutor() as pool:  # compiling takes most of the time
            compiling = [prepare_case(pool, choose(*case), *case) for case in cases]
            compiling_steps = [pool.submit(prepare_steps, *step) for step in steps_then]
            everything = [{name: way.result() for name, way in ways.items()} for ways in compiling]
        for case, prepared in zip(cases, everything, strict=True):
            if prepared:
                measure(*case, prepared, report_for(*case))
                prepared.clear()
        for step, loops in zip(steps_then, compiling_steps, strict=True):
            measure_steps(*step, loops.result(), report_for("step", 1, *step))
    (options.output / "benchmark_direction.json").write_text(json.dumps(header, indent=1))
    picture(rows, options.output / "benchmark_direction.png")
    print(f"{header['device']}, JAX {header['jax']}: written to {options.output}")
    failed = [row for row in rows if row["name"] == "failed"]
    if failed:
        raise SystemExit(f"{len(failed)} cases failed: their rows say why")


if __name__ == "__main__":
    main()
