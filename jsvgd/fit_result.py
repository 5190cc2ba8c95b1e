"""What ``jsvgd.fit`` returns: particles, a summary, diagnostics and a verdict in plain words."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from jsvgd.fit_checks import Diagnostics
from jsvgd.fit_loop import FitState, Record

__all__ = ["FitResult", "Summary", "judge", "summarise"]

MAX_ROWS = 40


class Summary(NamedTuple):
    """One row a scalar parameter, in the user's coordinates; arrays (p,).

    Attributes:
      names: such as "beta[0]"; "[0]" where the particles are one array.
      mean, sd: of the particles (sd with N - 1).
      q05, median, q95: quantiles.
    """

    names: tuple[str, ...]
    mean: np.ndarray
    sd: np.ndarray
    q05: np.ndarray
    median: np.ndarray
    q95: np.ndarray

    def __str__(self):
        width = max(10, *(len(name) for name in self.names[:MAX_ROWS]))
        columns = ("mean", "sd", "q05", "median", "q95")
        lines = [" " * width + "".join(f"{column:>12}" for column in columns)]
        for i, name in enumerate(self.names[:MAX_ROWS]):
            values = "".join(f"{getattr(self, column)[i]:12.4g}" for column in columns)
            lines.append(f"{name:<{width}}{values}")
        if len(self.names) > MAX_ROWS:
            lines.append(f"... and {len(self.names) - MAX_ROWS} more parameters")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class FitResult:
    """The outcome of ``jsvgd.fit``. Printing it shows the verdict, the warnings and the summary.

    Attributes:
      particles: pytree with a leading particle axis, as they were given.
      summary: ``Summary``.
      diagnostics: ``Diagnostics``.
      verdict: "good", "doubtful" or "failed", and why, in plain words.
      warnings: what to know before using the particles, with what to do about it.
      history: ``Record`` of NumPy arrays, one entry a block of steps.
      unconstrained: particles on the whole real line, (N, d).
      state: to go on from, ``fit(..., resume=result)``.
      num_steps: that the schedules were made for; ``diagnostics.num_steps`` of them are made.
    """

    particles: Any
    summary: Summary
    diagnostics: Diagnostics
    verdict: str
    warnings: tuple[str, ...]
    history: Record
    unconstrained: jax.Array
    state: FitState
    num_steps: int

    @property
    def good(self) -> bool:
        """Whether nothing speaks against the particles."""
        return self.verdict.startswith("good")

    def __str__(self):
        lines = [self.verdict, *(f"- {warning}" for warning in self.warnings)]
        return "\n".join([*lines, "", str(self.summary)])


def summarise(particles: Any) -> Summary:
    """The table of particles, a pytree of arrays (N, ...)."""
    names, columns = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(particles):
        name = "".join(_part(key, first=i == 0) for i, key in enumerate(path))
        rows = np.asarray(leaf, np.float64).reshape(leaf.shape[0], -1)
        indices = list(np.ndindex(leaf.shape[1:]))
        names += [name + (f"[{','.join(map(str, i))}]" if i else "") for i in indices]
        columns.append(rows)
    x = np.concatenate(columns, axis=1)
    with np.errstate(invalid="ignore"):  # of infinite particles, which the verdict names
        q05, median, q95 = np.quantile(x, [0.05, 0.5, 0.95], axis=0)
        sd = x.std(axis=0, ddof=1) if len(x) > 1 else np.zeros(x.shape[1])
        return Summary(tuple(names), x.mean(axis=0), sd, q05, median, q95)


def _part(key, first) -> str:
    label = str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))
    return label if first else f".{label}"


# Beyond these a figure is named in a warning. Residuals of independent draws at N = 100 are about 0.1.
DRIFT, MEAN_RESIDUAL, SPREAD_RESIDUAL = 0.05, 0.2, 0.3
KSD_RATIO, TURNING = 3.0, -0.3
SPLIT, SPLIT_OF_HALVES, SPLIT_OF_FEW = 0.78, 0.8, 2.0
MOVING = 5e-3  # rms direction, in sds: below, steps have nothing left to overshoot


def _largest_split_of_one_group(d: Diagnostics) -> float:
    """What two groups explain of draws from one: 0.75 for a uniform distribution, and noise.

    Halves of a flat distribution are the noisiest, up to 0.85 at N = 60; a smaller group of far fewer
    explains less by chance, which is where small modes show.
    """
    n = d.num_particles
    return SPLIT + SPLIT_OF_HALVES * d.split_share / np.sqrt(n) + SPLIT_OF_FEW / n


def judge(d: Diagnostics, complete: bool = True) -> tuple[str, tuple[str, ...]]:
    """The verdict and the warnings that these figures call for. A figure that is NaN is never good."""
    failures, doubts = [], []
    if not complete:
        failures.append(
            f"stopped after {d.num_steps} steps: the step size fell to {d.step_factor:.1e} of the one "
            "asked for and the steps still blew up or left the domain. State the supports of the "
            "parameters, supports=, check that the log density is smooth, rescale its parameters, or "
            "start nearer to the posterior."
        )
    if d.lost:
        failures.append(
            f"{d.lost} of {d.num_particles} particles lie where the log density has no finite "
            "gradient: state the supports of the parameters, supports=, or compute in float64."
        )
    if d.overflowed:
        failures.append(
            f"{d.overflowed} of {d.num_particles} particles are not finite in the units of the parameters, "
            "nor is the summary: pass float64 particles, or make the logarithm the parameter."
        )
    # Those that may be NaN in a sound run have words of their own below.
    unknown = [
        name
        for name, value in d._asdict().items()
        if np.isnan(value) and name not in ("sd_drift", "split", "split_share")
    ]
    if unknown:
        failures.append(
            f"{', '.join(unknown)} cannot be computed (NaN): nothing is known of these particles. Check "
            "that the log density and its gradient are finite and far from overflow around them."
        )
    too_few = d.num_particles <= d.dimension + 1
    if 1 < d.num_particles <= d.dimension + 1:
        doubts.append(
            f"{d.num_particles} particles for {d.dimension} dimensions cannot show a covariance, and their "
            "standard deviations cannot be relied on nor checked: only more particles than "
            "dimensions + 1 can be whitened. Take more particles, and read the means alone until then."
        )
    if d.retries:
        doubts.append(
            f"the step size was too large: {d.retries} blocks of steps blew up and were made again "
            f"with smaller steps (down to {d.step_factor:.2g} of it at the end). Lower step_size."
        )
    if d.turning < TURNING and d.last_direction > MOVING:
        doubts.append(
            f"successive steps turn back on each other (cosine {d.turning:.2f}): the step size is too "
            "large. Lower step_size."
        )
    if np.isnan(d.sd_drift) and complete:
        doubts.append(
            f"the run is too short to judge: it stopped after {d.num_steps} steps, no more than half of "
            "num_steps, and whether the standard deviations have settled shows in the second half. "
            "Go on with resume."
        )
    if d.sd_drift > DRIFT:
        doubts.append(
            f"a standard deviation still changed by {100 * np.expm1(d.sd_drift):.0f}% over the last half "
            "of the steps: not converged. Take more steps; if it keeps drifting, more particles "
            "(funnels and heavy tails need them) or a better parametrisation."
        )
    residual = max(d.mean_residual / MEAN_RESIDUAL, d.spread_residual / SPREAD_RESIDUAL)
    if residual > 1 and not too_few:
        (failures if residual > 10 else doubts).append(
            "Stein's identity does not hold: the mean score is off by "
            f"{d.mean_residual:.2f} / sd, E[(x - mean) score] by {d.spread_residual:.2f} from -1. The "
            "moments are not the posterior's yet: take more steps or more particles."
        )
    if d.ksd_ratio > KSD_RATIO:
        doubts.append(
            f"the squared kernel Stein discrepancy is {d.ksd_ratio:.1f} times that of independent draws: "
            "the shape is not the posterior's yet. Take more steps or more particles."
        )
    divided = d.split > _largest_split_of_one_group(d)
    if divided:
        doubts.append(
            f"the particles form two groups far apart ({100 * d.split_share:.0f}% in the smaller one): "
            "SVGD does not repair the weights of separated modes, the shares are those of the "
            "start. Use tempering or MCMC for the weights, and read each mode alone."
        )
    if np.isnan(d.split + d.split_share) and d.num_particles > 1:
        doubts.append(
            f"{d.num_particles} particles are too few to tell whether they form groups far apart: take at "
            "least 20."
        )
    if not divided and d.other_basin > 0:
        doubts.append(
            f"{100 * d.other_basin:.0f}% of the starting points lie in the basin of another mode, and the "
            "particles have gathered in one: the other modes are missing. Use tempering or MCMC "
            "where they matter."
        )
    if d.num_particles == 1:
        doubts.append("one particle finds the mode (maximum a posteriori), not the posterior.")
    if failures:
        verdict = "failed: these particles are not the posterior."
    elif doubts:
        verdict = "doubtful: read the warnings before using these particles."
    else:
        verdict = (
            "good: the standard deviations have settled and Stein's identity holds. Modes that no "
            "starting point leads to cannot be seen."
        )
    return verdict, tuple(failures + doubts)
