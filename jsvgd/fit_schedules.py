"""The schedules of ``jsvgd.fit``: hashable functions, so that equal ones share a compiled loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from jsvgd.transform import as_temperature

__all__ = ["step_schedule", "temperature_schedule", "widening_schedule"]


def step_schedule(step_size) -> tuple[float, Callable]:
    """A first step size and function(fraction, step, first) of a number or an optax schedule."""
    if callable(step_size):
        return 1.0, _OfStep(step_size)
    if not step_size > 0:
        raise ValueError(f"step_size must be positive, got {step_size}")
    return step_size, constant_then_linear


def widening_schedule(widening) -> tuple[float, Callable]:
    """A first factor and function(fraction, first) of a number or a function of the fraction."""
    if callable(widening):
        return 1.0, _OfFraction(widening)
    if not widening > 0:
        raise ValueError(f"widening must be positive, got {widening}")
    return widening, geometric


def temperature_schedule(temperature) -> Callable:
    """A function of the step, of a number or an optax schedule."""
    if callable(temperature):
        return temperature
    as_temperature(temperature)  # checks it
    return _Constant(float(temperature))


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
