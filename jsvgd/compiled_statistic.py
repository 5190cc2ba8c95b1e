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

from jsvgd import dispatch
from jsvgd.coordinates import middle
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
    with jax.enable_x64(False):  # the kernels count in 32 bits
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
    return _laplacians(interpret, found, v)


def _laplacians(interpret, found, v):
    # Differences do not depend on the centre, but its distance is what they are rounded at.
    v = v - middle(v)
    with jax.enable_x64(False):
        sums, twice = _kernels("triton_ties").laplacian(found, v, interpret=interpret)
        # No tie at all would mean that a distance came out differently there: NaN, not a silent zero.
        scale = jnp.where(twice > 0, 4 / jnp.maximum(twice, 1), jnp.nan)
        return sums * scale[:, None, None]


@_tied_gradients.defjvp
def _tied_gradients_jvp(interpret, primals, tangents):
    found, v = primals
    fixed = jax.tree.map(lax.stop_gradient, found)

    def each(_, vs):
        """Each rank's Laplacian of an array of its own, (R, N, d) to (R, N, d)."""
        parts = [
            _laplacians(interpret, fixed._replace(keys=fixed.keys[q : q + 1]), u)
            for q, u in enumerate(vs)
        ]
        return jnp.concatenate(parts)

    # JAX cannot transpose a kernel, but each Laplacian is symmetric: as the solution of a system whose
    # matrix is the identity, it may say so, and still be batched.
    tangent = jnp.broadcast_to(tangents[1], (found.keys.shape[0], *v.shape))
    linear = lax.custom_linear_solve(lambda x: x, tangent, each, symmetric=True)
    return _tied_gradients(interpret, found, v), linear
