"""Kills runs with SIGKILL at random moments, resumes them, and compares the end with an unbroken run.

    python -m experiments.kill_and_resume                    # ten kills

Each run is a process of its own: a Bayesian regression with minibatches, Adam and a history of the
particles. A killed one is started again with the same command until it ends; then its particles,
optimiser state and history have to be those of the unbroken run to the last bit.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jsvgd
from experiments.command_line import InputError, Parser, integer, run_script

__all__ = ["KEY", "main", "problem"]

KEY = jax.random.key(2)


def problem():
    """Sampler, first state and the options of ``jsvgd.run``: a linear regression with 200 rows."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(200, 5)).astype(np.float32)
    targets = inputs @ np.arange(5, dtype=np.float32) + rng.normal(size=200).astype(np.float32)

    def log_density(position, batch):
        inputs, targets = batch
        squared = (targets - inputs @ position["weights"] - position["bias"]) ** 2
        prior = jnp.sum(position["weights"] ** 2) + position["bias"] ** 2
        return -0.5 * (200 * jnp.mean(squared) + 0.1 * prior)

    sampler = jsvgd.svgd(log_density, optax.adam(0.02))
    first = {
        "weights": rng.normal(size=(50, 5)).astype(np.float32),
        "bias": rng.normal(size=50).astype(np.float32),
    }
    options = {"data": (inputs, targets), "batch_size": 32, "every": 7, "keep_particles": True}
    return sampler, sampler.init(first), options


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ``arguments`` are those of the process where None."""
    options = _parse(arguments)
    if options.worker is not None:
        _work(options)
        return
    moments = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, seconds = _timed_run(options, Path(folder) / "unbroken")
        print(f"unbroken run of {options.steps} steps: {seconds:.1f} s, digest {whole}")
        same = 0
        for i in range(options.kills):
            moment = moments.uniform(0.0, seconds)
            steps, digest = _killed_run(options, Path(folder) / f"killed{i}", moment)
            same += digest == whole
            verdict = "bitwise the unbroken run" if digest == whole else f"DIFFERS: {digest}"
            print(f"killed after {moment:5.2f} s with checkpoint {steps:>5}, resumed: {verdict}")
    print(f"{same} of {options.kills} killed runs end bitwise where the unbroken one does")
    if same < options.kills:
        raise InputError("a resumed run differs from the unbroken one")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m experiments.kill_and_resume",
        description="Kills runs at random moments, resumes them, compares with an unbroken run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--kills", type=integer(1), default=10, help="runs to kill")
    add("--steps", type=integer(1), default=1000, help="steps of a run")
    add("--every", type=integer(1), default=25, help="steps between checkpoints")
    add("--seed", type=integer(0), default=0, help="of the moments")
    add("--worker", metavar="DIR", help="be the run that is killed, with its checkpoints in DIR")
    add("--pause", type=float, default=0.0, help="seconds to wait at each record (worker)")
    return parser.parse_args(arguments)


def _work(options) -> None:
    sampler, state, run_options = problem()

    def tell(step, state, info):
        if options.pause:
            print(f"step {step}", flush=True)
            time.sleep(options.pause)

    end, history = jsvgd.run(
        KEY,
        sampler,
        state,
        options.steps,
        checkpoint=jsvgd.Checkpoint(options.worker, every=options.every),
        callback=tell if options.pause else None,
        **run_options,
    )
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves((end, history)):
        digest.update(np.asarray(leaf).tobytes())
    print(digest.hexdigest()[:16])


def _start(options, folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "experiments.kill_and_resume", "--worker", str(folder)]
    command += ["--steps", str(options.steps), "--every", str(options.every)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _digest_of(process: subprocess.Popen) -> str:
    output, _ = process.communicate()
    if process.returncode:
        raise InputError(f"a run failed with exit code {process.returncode}")
    return output.strip()


def _timed_run(options, folder: Path) -> tuple[str, float]:
    process = _start(options, folder)
    _wait_for_first_checkpoint(folder, process)
    begin = time.perf_counter()
    digest = _digest_of(process)
    return digest, time.perf_counter() - begin


def _killed_run(options, folder: Path, moment: float) -> tuple[str, str]:
    """The step of the last checkpoint when it was killed, and the digest of the resumed run."""
    process = _start(options, folder)
    _wait_for_first_checkpoint(folder, process)
    time.sleep(moment)
    process.kill()
    process.communicate()
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
    return str(max(steps, default=0)), _digest_of(_start(options, folder))


def _wait_for_first_checkpoint(folder: Path, process: subprocess.Popen) -> None:
    """Until the run has made something that a kill could spoil: files, whole or half written."""
    while not (folder.is_dir() and any(folder.iterdir())):
        if process.poll() is not None:
            return
        time.sleep(0.01)


if __name__ == "__main__":
    run_script(main)
