"""Many independent SVGD runs in one compiled program, compared with each other and with the truth.

    python -m experiments.multi_chain                        # 64 chains of 256 particles

A chain is a whole set of particles, with a key, a step size and a bandwidth factor of its own. Chains that
agree are no proof: all can be wrong alike. So every target has a truth beside it, exact or of a long NUTS
run, and the table says where SVGD with the median rule falls short.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jsvgd
from experiments.chain_targets import MODES, TARGETS, WEIGHTS, Target
from experiments.command_line import Parser, integer, output_folder, positive, require, run_script

__all__ = ["main", "run_chains", "summary"]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ``arguments`` are those of the process where None."""
    options = _parse(arguments)
    require("matplotlib")
    folder = output_folder(options.output)
    print(
        f"{options.chains} chains x {options.particles} particles, {options.steps} steps, "
        f"step sizes {options.step_size / 2:g} to {options.step_size * 2:g}, bandwidth factors 0.5 "
        f"to 2; JAX {jax.__version__} on {jax.devices()[0].device_kind}"
    )
    results = {}
    for name in options.targets or TARGETS:
        target = TARGETS[name]()
        keys = jax.random.split(jax.random.key(options.seed), options.chains)
        particles, seconds = _timed(target, keys, options)
        _, alone = _timed(target, keys[:1], options)
        results[name] = (target, particles)
        print("\n" + summary(target, particles))
        print(
            f"  time: {options.chains} chains {seconds:.2f} s, one chain {alone:.2f} s: "
            f"{seconds / alone:.1f} times as long for {options.chains} times as much"
        )
        arrays = {"particles": particles, "mean": target.mean, "sd": target.sd}
        np.savez(folder / f"{name}.npz", **arrays)
    _draw(folder / "chains.png", results)
    print(f"\nwrote chains.png and the particles to {folder}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m experiments.multi_chain",
        description="Vmapped independent SVGD runs on two modes, a banana and a regression.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--chains", type=integer(2), default=64, help="independent sets of particles")
    add("--particles", type=integer(4), default=256, help="particles of a chain")
    add("--steps", type=integer(1), default=500, help="SVGD steps")
    add(
        "--step-size",
        type=positive,
        default=0.1,
        help="of Adam, with cosine decay; per chain x 0.5-2",
    )
    add("--seed", type=integer(0), default=0, help="of all chains")
    add("--targets", nargs="+", choices=list(TARGETS), help="targets (absent: all)")
    add("--output", metavar="DIR", default="output/multi_chain", help="where to write")
    return parser.parse_args(arguments)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def run_chains(target_functions, num_particles, num_steps, keys, step_sizes, bandwidth_factors):
    """Particles of all chains, (C, N, d), from one compiled program.

    Args:
      target_functions: (log density, dimension, sd of the start).
      num_particles, num_steps: of every chain.
      keys, step_sizes, bandwidth_factors: (C,), one for each chain.
    """
    log_density, dimension, start_sd = target_functions

    def chain(key, step_size, factor):
        start_key, run_key = jax.random.split(key)
        schedule = optax.cosine_decay_schedule(1.0, num_steps, alpha=0.01)
        sampler = jsvgd.svgd(
            log_density,
            optax.adam(lambda step: step_size * schedule(step)),
            bandwidth=jsvgd.BandwidthSchedule(lambda step: factor),
        )
        start = start_sd * jax.random.normal(start_key, (num_particles, dimension))
        step = lambda state, key: (sampler.step(key, state)[0], None)
        state, _ = jax.lax.scan(step, sampler.init(start), jax.random.split(run_key, num_steps))
        return state.particles

    return jax.vmap(chain)(keys, step_sizes, bandwidth_factors)


def _timed(target: Target, keys, options) -> tuple[np.ndarray, float]:
    """The particles of the chains, and the seconds that the compiled program takes."""
    spread = jnp.exp(jnp.linspace(-jnp.log(2.0), jnp.log(2.0), len(keys)))
    arguments = (
        (target.log_density, target.dimension, target.start_sd),
        options.particles,
        options.steps,
        keys,
        options.step_size * spread,
        spread[::-1],
    )
    compiled = run_chains.lower(*arguments).compile()
    begin = time.perf_counter()
    particles = np.asarray(compiled(*arguments[3:]))
    return particles, time.perf_counter() - begin


def summary(target: Target, particles: np.ndarray) -> str:
    """What the chains say: agreement with each other, and with the truth."""
    means, sds = particles.mean(axis=1), particles.std(axis=1, ddof=1)  # (C, d)
    error = np.abs(means.mean(0) - target.mean) / target.sd
    ratio = sds.mean(0) / target.sd
    disagreement = means.std(axis=0, ddof=1) / target.sd
    lines = [
        f"{target.name} (d = {target.dimension}; truth: {target.truth})",
        f"  R-hat (rank-normalised, split): {_r_hat(particles)}",
        f"  chains' means differ by {disagreement.max():.3f} sd at most",
        f"  error of the mean: {error.max():.3f} sd at most, {error.mean():.3f} on average",
        f"  sd / true sd: {ratio.min():.3f} to {ratio.max():.3f}, {ratio.mean():.3f} on average",
    ]
    if target.name == "two modes":
        weights = np.mean(particles @ (MODES[1] - MODES[0]) > 0, axis=1)
        lines.append(
            f"  weight of the right mode (true {WEIGHTS[1]}): {weights.mean():.3f}, chains "
            f"{weights.min():.3f} to {weights.max():.3f}"
        )
    return "\n".join([*lines, f"  verdict: {_verdict(error, ratio)}"])


def _r_hat(particles: np.ndarray) -> str:
    try:
        data = jsvgd.to_arviz(particles, chains=True)
    except ImportError as error:
        return f"not computed, {error}"
    values = np.asarray(require("arviz").rhat(data)["x"])
    return f"{values.min():.3f} to {values.max():.3f}"


def _verdict(error: np.ndarray, ratio: np.ndarray) -> str:
    wrong = []
    if error.max() > 0.1:
        wrong.append(f"the mean is off by {error.max():.2f} sd, whatever the chains agree on")
    if ratio.min() < 0.9:
        wrong.append(f"variances collapse: sd down to {ratio.min():.2f} of the truth")
    if ratio.max() > 1.1:
        wrong.append(f"sd up to {ratio.max():.2f} of the truth")
    return "; ".join(wrong) or "means within 0.1 sd and sds within 10%"


def _draw(path: Path, results: dict[str, tuple[Target, np.ndarray]]) -> None:
    plt = require("matplotlib.pyplot")
    figure, panels = plt.subplots(1, len(results), figsize=(4.5 * len(results), 4.2), squeeze=False)
    for panel, (target, particles) in zip(panels[0], results.values(), strict=True):
        if target.dimension == 2:
            _draw_plane(panel, target, particles)
        else:
            sds = particles.std(axis=1, ddof=1)
            panel.errorbar(target.sd, sds.mean(0), sds.std(0), fmt=".", color="tab:blue")
            ends = [0, 1.05 * target.sd.max()]
            panel.plot(ends, ends, color="0.5", linewidth=0.8)
            panel.set(
                xlabel=f"sd ({target.truth})", ylabel="sd of the particles, mean ± sd of chains"
            )
        panel.set_title(target.name)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_plane(panel, target, particles) -> None:
    low, high = target.mean - 3.5 * target.sd, target.mean + 3.5 * target.sd
    grids = np.meshgrid(*(np.linspace(a, b, 120) for a, b in zip(low, high, strict=True)))
    points = jnp.stack([jnp.asarray(g.ravel(), jnp.float32) for g in grids], axis=1)
    density = np.exp(np.asarray(jax.vmap(target.log_density)(points))).reshape(grids[0].shape)
    levels = density.max() * np.array([0.01, 0.05, 0.2, 0.5, 0.8])
    panel.contour(*grids, density, levels=levels, colors="0.7", linewidths=0.8)
    for chain in particles[:: max(1, len(particles) // 2)][:2]:
        panel.plot(*chain.T, ".", markersize=3)


if __name__ == "__main__":
    run_script(main)
