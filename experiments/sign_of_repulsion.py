"""Why a PyTorch program and its CUDA version did not agree: the sign of the repulsion.

    python -m experiments.sign_of_repulsion

The program sums ``-diff / h * K`` over the wrong axis, so that particles attract one another (see
``jsvgd.reference.pytorch_direction``). Its CUDA version had the sign right. The table shows how far
apart the two are for N(0, I), in float64, and that the difference is twice the repulsion and nothing
else: no rounding, no median, no synchronisation. The picture shows what the sign does to a flow.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jsvgd
from experiments.command_line import Parser, integer, output_folder, require, run_script
from jsvgd import reference

__all__ = ["Comparison", "compare", "flow", "main"]

DIMENSIONS = (2, 16, 32, 64)
# Of the flows. Attraction pulls at a rate of up to 1 + 1 / h, about 4: a longer step would overshoot.
STEP_SIZE = 0.4


class Comparison(NamedTuple):
    """The direction as written against the right one, on the same particles.

    Attributes:
      mean, largest: of the absolute differences of all components.
      unexplained: largest absolute component of (right - as written) - 2 * repulsion.
      mended: largest absolute difference between the mended program and the right direction.
      by_jsvgd: the same for ``jsvgd.svgd_direction``.
    """

    mean: jax.Array
    largest: jax.Array
    unexplained: jax.Array
    mended: jax.Array
    by_jsvgd: jax.Array


@jax.jit
def compare(particles: jax.Array) -> Comparison:
    """Compares the directions at particles (N, d), with the score -x of N(0, I)."""
    scores = -particles
    h = reference.median_bandwidth(particles)
    right = reference.direction(particles, scores, h)
    written = reference.pytorch_direction(particles, scores, h)
    mended = reference.pytorch_direction(particles, scores, h, mended=True)
    repulsion = reference.direction(particles, jnp.zeros_like(scores), h)
    difference = right - written
    return Comparison(
        mean=jnp.mean(jnp.abs(difference)),
        largest=jnp.max(jnp.abs(difference)),
        unexplained=jnp.max(jnp.abs(difference - 2 * repulsion)),
        mended=jnp.max(jnp.abs(mended - right)),
        by_jsvgd=jnp.max(jnp.abs(jsvgd.svgd_direction(particles, scores, h) - right)),
    )


@functools.partial(jax.jit, static_argnames="num_steps")
def flow(particles: jax.Array, repulsion: float, *, num_steps: int) -> jax.Array:
    """Positions after 0, 1, ... ``num_steps`` steps on N(0, I), (num_steps + 1, N, d).

    The bandwidth is that of the start throughout: where it followed collapsing particles, it would
    shrink with them, and steps of any size would overshoot.
    """
    h = reference.median_bandwidth(particles)

    def step(x, _):
        moved = jsvgd.svgd_update(x, -x, h, STEP_SIZE, repulsion=repulsion)
        return moved, moved

    _, positions = jax.lax.scan(step, particles, length=num_steps)
    return jnp.concatenate([particles[None], positions])


def _table(num_particles: int, seed: int) -> str:
    lines = [
        f"N = {num_particles}, x ~ N(0, I), score -x, float64: "
        "the PyTorch program as written against the right direction",
        "",
        f"{'d':>4}{'mean |diff|':>14}{'max |diff|':>14}{'max |diff - 2 rep|':>21}"
        f"{'mended program':>17}{'jsvgd':>11}",
    ]
    for d in DIMENSIONS:
        particles = jax.random.normal(jax.random.key(seed), (num_particles, d))
        mean, largest, unexplained, mended, by_jsvgd = (float(v) for v in compare(particles))
        lines.append(
            f"{d:>4}{mean:>14.5f}{largest:>14.5f}{unexplained:>21.1e}{mended:>17.1e}{by_jsvgd:>11.1e}"
        )
    lines += [
        "",
        "diff: right - as written; rep: the repulsion. The last three columns are rounding: the",
        "difference is exactly twice the repulsion, and with the sign mended nothing is left.",
    ]
    return "\n".join(lines)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m experiments.sign_of_repulsion",
        description="Shows that the sign of the repulsion is what set a PyTorch program and its CUDA "
        "version apart, and what that sign does to the particles.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--particles", type=integer(2, 4096), default=1024, help="N of the table and of the flows")
    add("--steps", type=integer(1), default=300, help="steps of the two flows")
    add("--seed", type=integer(0, 2**32 - 1), default=0, help="of the particles")
    add("--output", metavar="DIR", default="output/sign_of_repulsion", help="where to write")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; ``arguments`` are those of the process where None."""
    options = _parse(arguments)
    require("matplotlib")
    folder = output_folder(options.output)
    with jax.enable_x64(True):
        print(_table(options.particles, options.seed))
        # Off the target, so that the flows are seen to travel.
        start = jax.random.normal(jax.random.key(options.seed), (options.particles, 2))
        start += jnp.array([-1.5, 1.0])
        written, right = (
            np.asarray(flow(start, sign, num_steps=options.steps)) for sign in (-1.0, 1.0)
        )
    print(
        f"\nflows of the same {options.particles} particles in 2 dimensions, {options.steps} steps:"
    )
    for positions, name in ((written, "as written"), (right, "right")):
        spread = positions.std(axis=1).mean(axis=1)
        print(
            f"{name:>12}: sd {spread[0]:.3f} at the start, {spread[-1]:.3f} at the end (target: 1)"
        )
    _draw(folder / "flows.png", written, right)
    print(f"wrote flows.png to {folder}")


def _draw(path, written, right):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, 3, figsize=(14, 5), layout="constrained", width_ratios=(1, 1, 0.9)
    )
    panels = (
        (axes[0], written, "#c0392b", "as written: attraction, the particles collapse"),
        (axes[1], right, "#2c6fad", "right: repulsion, the particles spread"),
    )
    for panel, positions, color, title in panels:
        _draw_flow(panel, positions, color)
        panel.set_title(title, size="medium")
        spread = positions.std(axis=1).mean(axis=1)
        axes[2].plot(spread, color=color, linewidth=2, label=title.split(":")[0])
    axes[2].axhline(1.0, color="#8a8a8a", linewidth=1, linestyle="--", label="target")
    axes[2].set(xlabel="step", ylabel="standard deviation of the particles", ylim=(0, None))
    axes[2].set_title("spread", size="medium")
    axes[2].legend(frameon=False)
    figure.suptitle(
        f"{written.shape[1]} particles on N(0, I) (circles: 1, 2, 3 sd), from the same start"
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_flow(axes, positions, color):
    import matplotlib.pyplot as plt

    for radius in (1, 2, 3):
        axes.add_patch(plt.Circle((0, 0), radius, fill=False, color="#8a8a8a", linewidth=0.8))
    shown = positions[:, :60]  # paths of all of them would hide one another
    axes.plot(shown[..., 0], shown[..., 1], color=color, linewidth=0.6, alpha=0.5)
    axes.plot(
        *positions[0].T,
        "o",
        markersize=2,
        markeredgewidth=0,
        color="#8a8a8a",
        alpha=0.6,
        label="start",
    )
    axes.plot(
        *positions[-1].T, "o", markersize=3, markeredgewidth=0, color=color, alpha=0.8, label="end"
    )
    axes.set(xlim=(-5.4, 3.8), ylim=(-3.8, 5.0), aspect="equal")
    axes.legend(loc="lower left", frameon=False)


if __name__ == "__main__":
    run_script(main)
