"""The schedules of ``jsvgd.fit``: hashable functions, so that equal ones share a compiled loop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jsvgd.arguments import check_real

__all__ = ["check_number", "step_schedule", "temperature_schedule", "widening_schedule"]


def step_schedule(step_size) -> tuple[float, Callable]:
    """A first step size and function(fraction, step, first) of a number or an optax schedule."""
    if callable(step_size):
        return 1.0, _OfStep(step_size)
    return check_number("step_size", step_size), constant_then_linear


def widening_schedule(widening) -> tuple[float, Callable]:
    """A first factor and function(fraction, first) of a number or a function of the fraction."""
    if callable(widening):
        return 1.0, _OfFraction(widening)
    return check_number("widening", widening), geometric


def temperature_schedule(temperature) -> Callable:
    """A function of the step, of a number or an optax schedule."""
    if callable(temperature):
        return temperature
    return _Constant(check_number("temperature", temperature))


def check_number(name: str, value, *, zero: bool = False) -> float:
    """The finite positive number, or at least 0 with ``zero``, or an error that names it."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a real number, got {value!r}")
    check_real(name, value, jnp.result_type(float))
    if np.shape(value):
        raise ValueError(f"{name} must be one number, got shape {np.shape(value)}")
    number = float(value)
    if zero and not 0 <= number < math.inf:
        raise ValueError(f"{name} must be at least 0 and finite, got {number}")
    if not zero and not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {number}")
    return number


def constant_then_linear(fraction, step, first):
    """The first step size for half of the steps, then linearly to a hundredth of it."""
    del step
    return first * jnp.where(fraction < 0.5, 1.0, jnp.maximum(2 * (1 - fraction), 0.01))


def geometric(fraction, first):
    """From the first factor to 1 over a quarter of the steps."""
    return first ** jnp.clip(1 - 4 * fraction, 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class _OfStep:
    schedule: Callable

    def __call__(self, fraction, step, first):
        return self.schedule(step)


@dataclasses.dataclass(frozen=True)
class _OfFraction:
    function: Callable

    def __call__(self, fraction, first):
        return self.function(fraction)


@dataclasses.dataclass(frozen=True)
class _Constant:
    value: float

    def __call__(self, step):
        return self.value
