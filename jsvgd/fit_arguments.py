"""Checks of the arguments of ``jsvgd.fit``: errors name the argument, what came and what was expected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from jsvgd.arguments import at_least
from jsvgd.fit_loop import FitState
from jsvgd.fit_result import FitResult
from jsvgd.fit_schedules import check_number
from jsvgd.preconditioner import Preconditioner, as_preconditioner

__all__ = ["check_numbers", "check_resume", "resolve_preconditioner"]


def check_numbers(
    num_steps, linear_weight, max_move, refresh_every, score_batch_size, stop_after
) -> None:
    """Raises where a number is none, is none alone, or is out of range."""
    whole = {"num_steps": num_steps, "refresh_every": refresh_every}
    optional = {"score_batch_size": score_batch_size, "stop_after": stop_after}
    whole |= {name: value for name, value in optional.items() if value is not None}
    for name, value in whole.items():
        if isinstance(value, (bool, np.bool_)):  # which Python counts with
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        at_least(name, value, 1)
    check_number("linear_weight", linear_weight, zero=True)
    check_number("max_move", max_move)


@dataclasses.dataclass(frozen=True)
class _FactorOf:
    """The factor of a user's function of the particles; equal where the function is, so compiled once."""

    function: Callable

    def __call__(self, particles):
        return as_preconditioner(self.function).factor(particles)


def resolve_preconditioner(
    given, refresh_every: int, x
) -> tuple[Preconditioner | None, jax.Array | None]:
    """A hashable preconditioner, or the constant factor of a matrix."""
    preconditioner = as_preconditioner(given, refresh_every)
    if preconditioner is None:
        return None, None
    preconditioner.check(x)
    if isinstance(given, (jax.Array, np.ndarray, list, tuple)):
        return None, preconditioner.factor(x).astype(x.dtype)
    if not isinstance(given, (str, Preconditioner)):
        preconditioner = Preconditioner(_FactorOf(given), refresh_every)
    period = preconditioner.refresh_every
    if period is not None and period % refresh_every:
        raise ValueError(
            "refresh_every of the preconditioner must be None or a multiple of that of fit, "
            f"{refresh_every}, got {period}"
        )
    return preconditioner, None


def check_resume(resume, state: FitState, num_steps: int, refresh_every: int) -> None:
    """Raises where the state of ``resume`` is not one of this run, which would start at ``state``."""
    if not isinstance(resume, FitResult):
        raise TypeError(
            f"resume must be the FitResult of an earlier call, got {type(resume).__name__}"
        )
    if resume.num_steps != num_steps:
        raise ValueError(
            f"resume is of a run with num_steps={resume.num_steps}, got num_steps={num_steps}"
        )
    for name in ("particles", "factor"):
        then, now = (_kind(getattr(s, name)) for s in (resume.state, state))
        if then != now:
            what = "unconstrained particles" if name == "particles" else "a preconditioner's factor"
            raise ValueError(f"resume is of a run with {what} of {then}, got {now}")
    step = int(resume.state.step)
    if step < num_steps and step % refresh_every:
        raise ValueError(
            f"resume is of a run that stopped after {step} steps, which are no whole blocks of "
            f"refresh_every={refresh_every}"
        )


def _kind(array) -> str:
    return "None" if array is None else f"shape {array.shape} and dtype {array.dtype}"
