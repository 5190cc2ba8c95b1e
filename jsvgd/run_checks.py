"""Checks of the arguments of ``jsvgd.run``: an error names the argument, what came, what was expected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jsvgd.arguments import at_least
from jsvgd.batches import ALL_ROWS, STREAM, count_rows, is_stream

__all__ = ["as_callbacks", "batch_choice", "check_key", "check_sampler", "steps_made"]


def check_key(name: str, key: Any) -> None:
    """Raises unless the value is one key, of ``jax.random.key`` or the older ``jax.random.PRNGKey``."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if shape != ():
            raise ValueError(f"{name} must be one key, got keys of shape {shape}")
    elif dtype != jnp.uint32 or len(shape) != 1:
        came = repr(key) if dtype is None else f"{dtype} of shape {shape}"
        raise TypeError(f"{name} must be a key of jax.random.key, got {came}")


def check_sampler(sampler: Any) -> None:
    """Raises unless the value has a sampler's ``init`` and ``step``."""
    if not (callable(getattr(sampler, "init", None)) and callable(getattr(sampler, "step", None))):
        raise TypeError(
            "sampler must have init and step, as jsvgd.svgd makes them, "
            f"got {type(sampler).__name__}"
        )


def batch_choice(data: Any, batch_size: int | None) -> str | int | None:
    """How a step finds its batch, for ``jsvgd.batches.batch_chooser``; None without data."""
    if is_stream(data):
        if batch_size is not None:
            raise ValueError(
                f"batch_size={batch_size} needs arrays to take batches from; an iterator gives its own"
            )
        return STREAM
    rows = None if data is None else count_rows(data)
    if batch_size is None:
        return None if data is None else ALL_ROWS
    batch_size = at_least("batch_size", batch_size, 1)
    if rows is None:
        raise ValueError(f"batch_size={batch_size} needs data to take batches from, got data=None")
    if batch_size > rows:
        raise ValueError(f"batch_size must be at most the {rows} rows of data, got {batch_size}")
    return ALL_ROWS if batch_size == rows else batch_size


def steps_made(state) -> int:
    """The steps in one sampler's state; an error for particles, chains of states and tracers."""
    if not hasattr(state, "step"):
        raise TypeError(f"state must come from sampler.init(particles), got {type(state).__name__}")
    if isinstance(state.step, jax.core.Tracer):
        raise TypeError("run does not work inside jit or vmap; scan over sampler.step there")
    if jnp.ndim(state.step):
        raise ValueError(
            "state must be that of one sampler, got a batch of "
            f"{jnp.shape(state.step)}; scan over jax.vmap(sampler.step) instead"
        )
    return int(state.step)


def as_callbacks(callback) -> tuple[Callable, ...]:
    """None, one callback or several as a tuple."""
    if callback is None:
        return ()
    callbacks = tuple(callback) if isinstance(callback, Sequence) else (callback,)
    for one in callbacks:
        if not callable(one):
            raise TypeError(f"callback must be a function or several, got {type(one).__name__}")
    return callbacks
