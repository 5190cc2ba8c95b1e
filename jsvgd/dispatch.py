"""Which implementation runs, and why.

The one place that knows the implementations, what each can take, and the measured reasons to prefer one.
``which_implementation`` asks it without running anything.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jsvgd.kernels import RadialKernel, get_kernel

__all__ = ["IMPLEMENTATIONS", "PRECISIONS", "Choice", "choose", "which_implementation"]

IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla", "dense", "interpret")
PRECISIONS = ("highest", "high", "default")


class Choice(NamedTuple):
    """An implementation and the reason for it."""

    implementation: str
    reason: str


def which_implementation(
    num_particles: int,
    dimension: int,
    *,
    num_queries: int | None = None,
    dtype="float32",
    kernel: str | RadialKernel = "rbf",
    precision: str = "high",
    platform: str | None = None,
) -> Choice:
    """What ``svgd_direction`` would run for these shapes with ``implementation=None``.

    Args:
      num_particles: N.
      dimension: d.
      num_queries: M; N where absent (queries are the particles).
      dtype: of the particles.
      kernel: "rbf", "imq" or a ``RadialKernel``.
      precision: "highest", "high" or "default".
      platform: "cpu", "gpu" or "tpu"; JAX's default backend where absent.

    Returns:
      ``Choice(implementation, reason)``.

    Example:
      >>> which_implementation(1000, 50, platform="cpu").implementation
      'xla'
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
    return choose(
        num_particles,
        num_particles if num_queries is None else num_queries,
        dimension,
        dtype=jnp.dtype(dtype),
        kernel=get_kernel(kernel),
        precision=precision,
        platform=platform or jax.default_backend(),
    )


def choose(n, m, d, *, dtype, kernel, precision, platform) -> Choice:
    """The choice behind ``which_implementation``, for checked arguments."""
    del n, m, d, kernel, precision
    if platform != "gpu":
        return Choice("xla", f"compiled GPU kernels do not run on {platform}")
    if dtype == jnp.float64:
        return Choice("xla", "float64 has no compiled kernel")
    return Choice("xla", "no compiled kernel takes this case")
