"""What densities of networks share: Gamma distributed precisions as logarithms, dtypes, checks."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jsvgd.arguments import check_real

__all__ = ["at_least_float32", "check_positive", "log_gamma_density", "log_gamma_sample"]


def log_gamma_density(log_value: jax.Array, shape: float, rate: float) -> jax.Array:
    """Log density of log v for v ~ Gamma(shape, rate); the Jacobian adds log v."""
    constant = shape * math.log(rate) - math.lgamma(shape)
    return shape * log_value - rate * jnp.exp(log_value) + constant


def log_gamma_sample(rng_key: jax.Array, shape: float, rate: float) -> jax.Array:
    """log v for v ~ Gamma(shape, rate)."""
    return jax.random.loggamma(rng_key, shape) - math.log(rate)


def at_least_float32(array: jax.Array) -> jax.Array:
    """float16 and bfloat16 become float32."""
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def check_positive(**values: float) -> None:
    """Raises an error that names the argument which is no positive number."""
    for name, value in values.items():
        check_real(name, value, jnp.result_type(float))
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
