"""Checks of arguments: an error names the argument, what came and what was expected."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["at_least", "check_bandwidth", "check_matrix", "check_real"]


def check_matrix(name: str, value) -> jax.Array:
    """The value as a floating (N, d) array with N, d >= 1, or an error that names it."""
    if not isinstance(value, jax.Array):
        value = np.asarray(value)
    if value.ndim != 2:
        raise ValueError(f"{name} must have shape (N, d), got {value.shape}")
    if 0 in value.shape:
        raise ValueError(f"{name} must hold at least one row and one column, got {value.shape}")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"{name} must have a floating dtype, got {value.dtype}")
    return jnp.asarray(value)


def check_bandwidth(bandwidth, dimension: int) -> jax.Array:
    """The bandwidth as a positive scalar or (d,) array, or an error that says what came."""
    if not isinstance(bandwidth, jax.Array):
        bandwidth = np.asarray(bandwidth)
    if not jnp.issubdtype(bandwidth.dtype, jnp.floating):
        if not jnp.issubdtype(bandwidth.dtype, jnp.integer):
            raise TypeError(f"bandwidth must be a real number, got dtype {bandwidth.dtype}")
        bandwidth = bandwidth.astype(jnp.result_type(float))
    if bandwidth.shape not in ((), (dimension,)):
        raise ValueError(
            f"bandwidth must be a scalar or have shape ({dimension},), got {bandwidth.shape}"
        )
    if not isinstance(bandwidth, jax.core.Tracer):
        # NaN passes: it comes of particles that have left the domain, and it shows in the result.
        smallest = np.min(np.asarray(bandwidth, np.float64))
        if smallest <= 0:
            raise ValueError(f"bandwidth must be positive, got {smallest}")
    return jnp.asarray(bandwidth)


def check_real(name: str, value, dtype) -> jax.Array:
    """The number, or array of numbers, in that dtype, or an error that names it."""
    kind = np.asarray(value).dtype if not isinstance(value, jax.Array) else value.dtype
    if not (jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)):
        raise TypeError(f"{name} must be a real number, got {value!r}")
    return jnp.asarray(value, dtype)


def at_least(name: str, value: int, least: int) -> int:
    """The whole number, or an error that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number
