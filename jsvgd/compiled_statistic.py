"""Order statistics of pair distances on compiled kernels, as a differentiable function.

The kernels of ``pallas_kernels`` find the values in a fixed number of launches, and the derivative: a second
derivative, and any other, is the same Laplacian of the tied pairs applied once more.
"""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import linear_call

from jsvgd import dispatch
from jsvgd.dispatch import Choice

__all__ = ["choose", "order_statistics", "supports"]


def _kernels(name: str):
    # Imported when first wanted: Pallas takes a second that CPU users need not wait.
    return importlib.import_module(f"pallas_kernels.{name}")


def choose(n: int, d: int, *, dtype, platform: str) -> Choice:
    """What finds an order statistic of the distances of n particles in d dimensions, and why."""
    if platform != "gpu":
        return Choice("xla", f"compiled GPU kernels do not run on {platform}")
    capability = dispatch._compute_capability()
    if capability < 8.0:
        return Choice("xla", f"compute capability {capability} is below 8.0")
    takes, why_not = supports(n, d, dtype)
    if takes:
        return Choice("triton", "passes that never wait for the host")
    return Choice("xla", f"triton: {why_not}")


def supports(n: int, d: int, dtype) -> tuple[bool, str]:
    """Whether the kernels take these, and why not."""
    return _kernels("triton_rank").supports(n, d, dtype)


def order_statistics(particles: jax.Array, ranks: tuple[int, ...], *, interpret: bool) -> jax.Array:
    """As ``jsvgd.order_statistic.order_statistics``, for what `supports` takes."""
    found = _select(lax.stop_gradient(particles), ranks, interpret)
    return _with_derivative(interpret, found, particles)


@functools.partial(jax.jit, static_argnums=(1, 2))  # eager calls would launch pass by pass
def _select(particles, ranks, interpret):
    return _kernels("triton_rank").order_statistics(particles, ranks, interpret=interpret)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_derivative(interpret, found, particles) -> jax.Array:
    """The values (R,), as a differentiable function of the particles."""
    return found.values


@_with_derivative.defjvp
def _with_derivative_jvp(interpret, primals, tangents):
    gradients = _tied_gradients(interpret, *primals)
    return _with_derivative(interpret, *primals), jnp.sum(gradients * tangents[1], axis=(1, 2))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _tied_gradients(interpret, found, v) -> jax.Array:
    """For each rank, the mean over the pairs that tie of 2 (e_i - e_j) (v_i - v_j): (R, N, d)."""
    v = v - jnp.mean(v, axis=0)  # makes no difference but of rounding
    sums, twice = _kernels("triton_ties").laplacian(found, v, interpret=interpret)
    # No tie at all would mean that a distance came out differently there: NaN, not a silent zero.
    scale = jnp.where(twice > 0, 4 / jnp.maximum(twice, 1), jnp.nan)
    return sums * scale[:, None, None]


@_tied_gradients.defjvp
def _tied_gradients_jvp(interpret, primals, tangents):
    found, v = primals

    def apply(found, v):
        return _tied_gradients(interpret, found, v)

    def transpose(found, cotangent):
        # Symmetric: each rank's Laplacian once more.
        total = jnp.zeros_like(cotangent[0])
        for q, part in enumerate(cotangent):
            total += apply(found._replace(keys=found.keys[q : q + 1]), part)[0]
        return total

    fixed = jax.tree.map(lax.stop_gradient, found)
    return apply(found, v), linear_call(apply, transpose, fixed, tangents[1])
