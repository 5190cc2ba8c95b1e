"""Which implementation runs, and why.

The one place that knows the implementations, what each can take, and the measured reasons to prefer one.
``which_implementation`` asks it without running anything.
"""

from __future__ import annotations

import importlib
import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jsvgd.composite import as_kernel, terms_of
from jsvgd.coordinates import Raw
from jsvgd.kernels import IMQ, RBF, RadialKernel

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
    kernel="rbf",
    precision: str = "high",
    platform: str | None = None,
    gradient: bool = False,
) -> Choice:
    """What ``svgd_direction`` would run for these shapes with ``implementation=None``.

    Args:
      num_particles: N.
      dimension: d.
      num_queries: M; N where absent (queries are the particles).
      dtype: of the particles.
      kernel: as in ``svgd_direction``.
      precision: "highest", "high" or "default".
      platform: "cpu", "gpu" or "tpu"; JAX's default backend where absent.
      gradient: whether the question is what makes the gradient.

    Returns:
      ``Choice(implementation, reason)``; for a sum of kernels, that of its radial terms.

    Raises:
      ValueError: a size below 1, or a name that does not exist.

    Example:
      >>> which_implementation(1000, 50, platform="cpu").implementation
      'xla'
    """
    check_names(precision)
    sizes = {"num_particles": num_particles, "dimension": dimension}
    if num_queries is not None:
        sizes["num_queries"] = num_queries
    for name, size in sizes.items():
        if not isinstance(size, numbers.Integral) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")
    if platform not in (None, "cpu", "gpu", "tpu"):
        raise ValueError(f'platform must be None, "cpu", "gpu" or "tpu", got {platform!r}')
    radial = [term for _, term in terms_of(as_kernel(kernel)) if isinstance(term, RadialKernel)]
    if not radial:
        return Choice("xla", "not a radial kernel: matrix products in closed form")
    return choose(
        num_particles,
        num_queries,
        dimension,
        dtype=jnp.dtype(dtype),
        kernel=radial[0],
        precision=precision,
        platform=platform or jax.default_backend(),
        backward=gradient,
    )


def check_names(precision: str, implementation: str | None = None) -> None:
    """Raises ValueError for a precision or an implementation that does not exist."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}"
        )


def choose(n, m, d, *, dtype, kernel, precision, platform, backward=False) -> Choice:
    """The choice behind ``which_implementation``, for checked arguments; with backward, the gradient's.

    m is None where the queries are the particles: that is not the same as N queries of their own.
    """
    if platform != "gpu":
        return Choice("xla", f"compiled GPU kernels do not run on {platform}")
    if dtype != jnp.float32:
        return Choice("xla", f"no compiled kernel computes in {dtype.name}")
    capability = _compute_capability()
    declined = []
    rows = n if m is None else max(n, m)
    options = {"dtype": dtype, "kernel": kernel, "precision": precision, "backward": backward}
    for implementation in _preference(rows, d, capability, backward):
        takes, why_not = supports(implementation, n, d, m=m, **options)
        if takes:
            return Choice(implementation, _REASONS[implementation])
        declined.append(f"{implementation}: {why_not}")
    return Choice("xla", "; ".join(declined) or f"compute capability {capability} is below 8.0")


_REASONS = {
    "mosaic_gpu": "Hopper's tensor cores, fed by its copy engine, in one fused kernel",
    "triton": "the portable fused kernel",
}


def _preference(rows, d, capability, backward) -> list[str]:
    """Compiled implementations for this device, the fastest first."""
    if capability < 8.0:
        return []
    if not 9.0 <= capability < 10.0:
        return ["triton"]
    # Measured on one H200: 4096 x 64 takes the portable kernel 0.046 ms, Hopper's 0.055; its gradient
    # 0.151 and 0.137; 16384 x 64 0.47 and 0.34. Two dimensions are bound by the pairs' own arithmetic,
    # not by products: 65536 x 2 takes 1.49 and 2.03, x 4 2.31 and 2.04.
    few = rows <= (FEW_ROWS if backward or d > 64 else 4 * FEW_ROWS)
    portable_first = d <= 2 or few
    return ["triton", "mosaic_gpu"] if portable_first else ["mosaic_gpu", "triton"]


# Up to here one launch from raw arrays beats operands prepared once; in a few dimensions the differences
# of triton_forward, exact wherever particles lie, cost no more.
FEW_ROWS, FEW_ROWS_FROM_DIMENSION = 1024, 9


def supports(
    implementation, n, d, *, m=None, dtype, kernel: RadialKernel, precision, backward=False
) -> tuple[bool, str]:
    """Whether the implementation takes these shapes (m as in ``choose``), and why not.

    With backward, whether the compiled gradient does; XLA has none that is compiled.
    """
    if implementation in ("xla", "dense"):
        return not backward, ""
    # Imported when first wanted: Pallas takes a second that CPU users need not wait.
    if not backward and _few_in_many_dimensions(implementation, n, d, m is not None):
        from pallas_kernels import triton_gram as module
    else:
        family = "hopper" if implementation == "mosaic_gpu" else "triton"
        which = "backward" if backward else "forward"
        module = importlib.import_module(f"pallas_kernels.{family}_{which}")
    return module.supports(kernel_name(kernel), n, n if m is None else m, d, precision, dtype)


def in_gram_regime(implementation, raw: Raw) -> bool:
    """Whether the portable kernels cut the work along d instead of along the particles."""
    return _few_in_many_dimensions(implementation, *raw.particles.shape, raw.queries is not None)


def is_small(implementation, raw: Raw) -> bool:
    """Whether the portable kernel for few particles takes these."""
    n, d = raw.particles.shape
    rows = n if raw.queries is None else max(n, raw.queries.shape[0])
    few = rows <= FEW_ROWS and d >= FEW_ROWS_FROM_DIMENSION
    return few and implementation in ("triton", "interpret")


def _few_in_many_dimensions(implementation, n, d, has_queries) -> bool:
    return (
        implementation in ("triton", "interpret")
        and not has_queries
        and d > LARGE_DIMENSION
        and n <= FEW_PARTICLES
    )


# Rows beyond this leave registers and shared memory; N x N weights beyond that leave O(N d) behind.
LARGE_DIMENSION, FEW_PARTICLES = 256, 4096


def matmul_precision(precision: str) -> lax.Precision:
    """Set on every product: XLA's own default for float32 on a GPU is one pass of TF32."""
    return lax.Precision.DEFAULT if precision == "default" else lax.Precision.HIGHEST


def kernel_name(kernel: RadialKernel) -> str:
    """The name by which the compiled kernels know it: theirs belong to our own profiles alone."""
    return kernel.name if kernel in (RBF, IMQ) else f"RadialKernel({kernel.name!r})"


def _compute_capability() -> float:
    try:
        return float(jax.devices("gpu")[0].compute_capability)
    except (RuntimeError, AttributeError, ValueError):
        return 0.0  # no CUDA device, or one that does not say
