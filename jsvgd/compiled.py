"""The direction and its gradient on compiled kernels, behind the guard for particles far apart.

Three families of kernels can make them: Hopper's and the portable ones, which tile rows of particles, and
the portable ones for few particles in many dimensions, which make the N x N weights between two passes
over d. All work by products, which need particles near their centre (``coordinates``), so each result goes
through a kernel that puts differences in its place where particles are far, and does little where not.
A particle lost to NaN counts as far: differences carry it into every result, products might not.
"""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp

from jsvgd import coordinates, streamed
from jsvgd.coordinates import FAR, Raw, is_beyond, standardise
from jsvgd.dispatch import in_gram_regime, is_small, kernel_name

__all__ = ["backward", "forward"]


def _kernels(name: str):
    # Imported when first wanted: Pallas takes a second that CPU users need not wait.
    return importlib.import_module(f"pallas_kernels.{name}")


def _family(implementation: str) -> str:
    return "hopper" if implementation == "mosaic_gpu" else "triton"


def _interpreted(implementation: str) -> dict:
    return {"interpret": True} if implementation == "interpret" else {}


def forward(implementation, raw: Raw, step_size, *, kernel, precision) -> jax.Array:
    """phi of raw inputs, or particles + step_size * phi, (M, d)."""
    make = _by_weights if in_gram_regime(implementation, raw) else _by_rows
    return make(implementation, raw, step_size, kernel, precision)


def _by_rows(implementation, raw, step_size, kernel, precision):
    name, interpreted = kernel_name(kernel), _interpreted(implementation)
    base = None if step_size is None else raw.particles
    # Where queries are the particles, the same object: the kernels share its operands.
    arrays = (raw.particles if raw.queries is None else raw.queries, *raw[1:])
    options = {"kernel": name, **interpreted}
    if is_small(implementation, raw):
        return _kernels("triton_small").forward(
            *arrays, precision=precision, limit=FAR, base=base, step=step_size, **options
        )
    near = standardise(raw)
    phi = _kernels(f"{_family(implementation)}_forward").forward(
        near.particles if near.queries is None else near.queries,
        *near[1:],
        precision=precision,
        base=base,
        scale=step_size,
        **options,
    )
    far = is_beyond(FAR, near)
    return _kernels("triton_apart").forward(phi, far, *arrays, base=base, step=step_size, **options)


def _by_weights(implementation, raw, step_size, kernel, precision):
    """Few particles in many dimensions: N^2 numbers are nothing beside N d."""
    interpreted = _interpreted(implementation)
    few, apart = _kernels("triton_gram"), _kernels("triton_apart")
    x = raw.particles
    # Any particle serves as the centre: phi does not depend on it, and none costs a pass over x. A stray
    # one makes all the others far.
    gram = few.gram(x, x[0], raw.scale, precision=precision, **interpreted)
    norms = jnp.diagonal(gram)
    limit = FAR if precision == "highest" else coordinates.FAR_COARSE
    far = ~(0.5 * jnp.max(norms) <= limit)
    u = jnp.maximum(0.5 * (norms[:, None] + norms[None, :]) - gram, 0.0)
    u = apart.half_squared_distances(u, far, x, raw.scale, **interpreted)
    weights, slopes = kernel.profile(u), kernel.slope(u)
    base = None if step_size is None else x
    phi = few.combine(
        weights,
        slopes,
        x,
        raw.scores,
        x[0],
        raw.scale,
        raw.drift,
        kernel=kernel.name,
        precision=precision,
        base=base is not None,
        step=step_size,
        **interpreted,
    )
    return apart.combine(
        phi, far, weights, slopes, *raw[1:], base=base, step=step_size, **interpreted
    )


def backward(
    implementation, raw: Raw, cotangent, *, kernel, precision, isotropic
) -> streamed.Gradient:
    """Gradients of the direction of particles on themselves, for shapes that the kernels take."""
    near = standardise(raw)
    _, z, scores, drift = near
    name, interpreted = kernel_name(kernel), _interpreted(implementation)
    dz, ds, exchange = _kernels(f"{_family(implementation)}_backward").backward(
        z, scores, drift, cotangent, kernel=name, precision=precision, **interpreted
    )
    coarse = precision != "highest"
    limit = coordinates.FAR_BACKWARD_COARSE if coarse else coordinates.FAR_BACKWARD
    dz, ds, d_drift, d_log_scale = _kernels("triton_apart").backward(
        (dz, ds, z * exchange, z * dz),
        is_beyond(limit, near),
        *raw[1:],
        cotangent,
        kernel=name,
        **interpreted,
    )
    if isotropic:  # sums of everything are quicker than sums of columns
        d_drift, d_log_scale = (x.reshape(-1, 1) for x in (d_drift, d_log_scale))
    return streamed.Gradient(dz, ds, jnp.sum(d_drift, axis=0), jnp.sum(d_log_scale, axis=0))
