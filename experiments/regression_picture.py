"""The picture of a regression: predictions against targets, and whether their spread is honest."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

__all__ = ["draw"]

_BLUE, _ORANGE, _GREY = "#2c6fad", "#d9772b", "#8a8a8a"


def draw(path: Path, *, title: str, targets, prediction, probability) -> None:
    """Writes the picture.

    Args:
      path: a PNG file.
      title: of the whole picture.
      targets: (R,), in their own units.
      prediction: ``mean``, ``sd``, ``epistemic_sd`` and ``aleatoric_sd``, each (R,).
      probability: predictive probability of a target at most as large as the one seen, (R,). The band
        of chance takes the rows for independent, which those of several splits are not quite.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 5.0), layout="constrained")
    _draw_predictions(left, targets, prediction)
    _draw_calibration(right, np.asarray(probability))
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_predictions(axes, targets, prediction):
    if len(targets) <= 300:
        axes.errorbar(
            targets,
            prediction.mean,
            yerr=prediction.sd,
            fmt="o",
            markersize=4,
            color=_BLUE,
            elinewidth=0.9,
            alpha=0.75,
            label="predictive mean ± sd",
        )
        ends = _range(targets, prediction.mean - prediction.sd, prediction.mean + prediction.sd)
    else:  # bars would hide one another
        axes.plot(
            targets,
            prediction.mean,
            "o",
            markersize=3,
            markeredgewidth=0,
            color=_BLUE,
            alpha=0.35,
            label="predictive mean",
        )
        ends = _range(targets, prediction.mean)
    axes.plot(ends, ends, color=_GREY, linewidth=1, zorder=0, label="exact")
    between, noise = (np.sqrt(np.mean(np.square(sd))) for sd in prediction[2:])
    axes.set(
        xlabel="target (test rows)",
        ylabel="prediction",
        title=f"typical sd: {between:.2g} between networks, {noise:.2g} noise",
        xlim=ends,
        ylim=ends,
        aspect="equal",
    )
    axes.title.set_size("medium")
    axes.legend(loc="upper left", frameon=False)


def _range(*arrays):
    least, most = min(map(np.min, arrays)), max(map(np.max, arrays))
    margin = 0.04 * (most - least)
    return least - margin, most + margin


def _draw_calibration(axes, probability):
    levels = np.linspace(0.0, 1.0, 51)
    # A central interval of level q holds the target where its probability is within q/2 of 1/2.
    observed = np.mean(np.abs(probability[:, None] - 0.5) <= levels / 2, axis=0)
    error = np.sqrt(levels * (1 - levels) / len(probability))
    axes.fill_between(
        levels,
        np.clip(levels - 2 * error, 0, 1),
        np.clip(levels + 2 * error, 0, 1),
        color=_GREY,
        alpha=0.25,
        linewidth=0,
        label=f"chance, ±2 standard errors ({len(probability)} rows)",
    )
    axes.plot(levels, levels, color=_GREY, linewidth=1, label="exact")
    axes.plot(levels, observed, color=_ORANGE, linewidth=2, label="seen")
    axes.set(
        xlabel="probability of the central interval",
        ylabel="share of targets inside",
        title="above the line: spread too wide; below: too narrow",
        xlim=(0, 1),
        ylim=(0, 1),
        aspect="equal",
    )
    axes.title.set_size("medium")
    axes.legend(loc="upper left", frameon=False)
