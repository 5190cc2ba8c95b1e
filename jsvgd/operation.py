"""The differentiable operation itself: coordinates, the near and the far path, custom_vjp.

``svgd_direction`` checks its arguments and comes here. The inputs of every function below are

    (particles, scores, bandwidth, queries or None, repulsion, step_size or None)

and with a step size the result is particles + step_size * phi.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jsvgd import dispatch, gram, reference, streamed
from jsvgd.kernels import RadialKernel

__all__ = ["Config", "compute_dtype", "dense", "direction", "evaluate"]

# Above this max|z|^2 / 2 the expansion |x|^2 + |y|^2 - 2xy has lost more than ten of its bits, and the
# pairs are computed by direct differences instead.
FAR = 1000.0


class Config(NamedTuple):
    """What is fixed when the operation is compiled."""

    kernel: RadialKernel
    precision: str
    implementation: str


def compute_dtype(*arrays):
    """float64 where the inputs are, float32 for everything narrower."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


# --- coordinates -----------------------------------------------------------------------------------


class _Raw(NamedTuple):
    """The inputs in the dtype of the computation, scale = h^-1/2 and drift = repulsion h^-1/2, (d,)."""

    queries: jax.Array | None  # None: the particles
    particles: jax.Array
    scores: jax.Array
    scale: jax.Array
    drift: jax.Array


class _Standardised(NamedTuple):
    """z = (x - centre) scale for queries and particles, raw scores, drift."""

    queries: jax.Array | None  # None: the particles
    particles: jax.Array
    scores: jax.Array
    drift: jax.Array


def _raw(particles, scores, bandwidth, queries, repulsion) -> _Raw:
    dtype = compute_dtype(particles, scores)
    x, s, h = (a.astype(dtype) for a in (particles, scores, bandwidth))
    y = None if queries is None else queries.astype(dtype)
    scale = jnp.broadcast_to(lax.rsqrt(h), (x.shape[1],))
    return _Raw(y, x, s, scale, repulsion * scale)


def _standardise(raw: _Raw) -> _Standardised:
    """Centre first (phi is translation invariant, rounding is not), then scale by the bandwidth."""
    # Any centre gives the same phi, so it carries no derivative. But particles and queries must have the
    # same one to the bit: XLA may fuse the mean's division with the subtraction into one multiply-add
    # for one of them only. A centre rounded by one bit more leaves it nothing to contract.
    mean = lax.stop_gradient(jnp.mean(raw.particles, axis=0))
    exponent, mantissa = jnp.finfo(mean.dtype).nexp, jnp.finfo(mean.dtype).nmant
    centre = lax.reduce_precision(mean, exponent, mantissa - 1)
    z = (raw.particles - centre) * raw.scale
    y = None if raw.queries is None else (raw.queries - centre) * raw.scale
    return _Standardised(y, z, raw.scores, raw.drift)


@jax.custom_batching.custom_vmap
def _is_far(half_squared_norm):
    return half_squared_norm > FAR


@_is_far.def_vmap
def _any_is_far(axis_size, in_batched, half_squared_norm):
    # One answer for the whole batch: under vmap a batched lax.cond would run both of its branches.
    # The far path is right for near particles too. A chain that is lost to NaN has no say.
    del axis_size, in_batched
    return _is_far(jnp.nanmax(half_squared_norm, axis=0)), False


def _far(a: _Standardised):
    sets = [z for z in (a.queries, a.particles) if z is not None]
    norms = [
        0.5 * jnp.nanmax(jnp.sum(z * z, axis=1)) for z in sets
    ]  # a NaN query has no say either
    return _is_far(lax.stop_gradient(functools.reduce(jnp.fmax, norms)))


# --- the operation ---------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=0)
def dense(config: Config, particles, scores, bandwidth, queries, repulsion, step_size):
    dtype = compute_dtype(particles, scores)
    x, s, h = (a.astype(dtype) for a in (particles, scores, bandwidth))
    y = None if queries is None else queries.astype(dtype)
    phi = reference.direction(x, s, h, queries=y, kernel=config.kernel, repulsion=repulsion)
    return _stepped(x, phi, step_size).astype(jnp.result_type(particles, scores))


def _stepped(x, phi, step_size):
    return phi if step_size is None else x + step_size * phi


@functools.partial(jax.jit, static_argnums=0)
def evaluate(config: Config, particles, scores, bandwidth, queries, repulsion, step_size):
    raw = _raw(particles, scores, bandwidth, queries, repulsion)

    def by_differences(raw, _):
        phi = streamed.forward(
            *raw[:3],
            raw.drift,
            kernel=config.kernel,
            precision=dispatch.matmul_precision(config.precision),
            pairs=streamed.direct(raw.scale),
        )
        return _stepped(raw.particles, phi, step_size)

    if dispatch.in_gram_regime(config.implementation, *particles.shape, queries is not None):
        far, near, by_products = _gram_regime(config, raw, step_size)
    else:
        far, near, by_products = _row_regime(config, raw, step_size)
    result = lax.cond(far, by_differences, by_products, raw, near)
    return result.astype(jnp.result_type(particles, scores))


def _row_regime(config, raw, step_size):
    """Whether particles lie far, what the near path needs, and the near path: tiles of rows."""
    fused = {} if step_size is None else {"base": raw.particles, "scale": step_size}

    def by_products(_, near):
        return dispatch.forward(
            config.implementation, near, kernel=config.kernel, precision=config.precision, **fused
        )

    near = _standardise(raw)
    return _far(near), near, by_products


def _gram_regime(config, raw, step_size):
    """The same for few particles in many dimensions: the weights of all pairs in between two passes."""
    options = {
        "kernel": config.kernel,
        "precision": config.precision,
        "interpret": config.implementation == "interpret",
    }

    def by_products(raw, pairs):
        return gram.direction(pairs, *raw[1:], step_size, **options)

    pairs = gram.pair_weights(raw.particles, raw.scale, **options)
    return _is_far(pairs.half_squared_norm), pairs, by_products


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def direction(config: Config, *inputs):
    return evaluate(config, *inputs)


def _direction_fwd(config, *inputs):
    return direction(config, *inputs), inputs


@functools.partial(jax.jit, static_argnums=0)
def _direction_bwd(config, inputs, cotangent):
    particles, scores, bandwidth, queries, _, step_size = inputs
    if queries is not None:
        # Two sets of rows own the gradient here: XLA derives both passes from the streamed forward.
        _, vjp = jax.vjp(
            functools.partial(evaluate, config._replace(implementation="xla")), *inputs
        )
        return vjp(cotangent)
    raw = _raw(*inputs[:-1])
    near = _standardise(raw)
    cotangent = cotangent.astype(raw.particles.dtype)
    g = cotangent if step_size is None else step_size * cotangent
    isotropic = bandwidth.ndim == 0

    def by_differences(raw, near, g):
        del near
        return streamed.backward(
            *raw[1:3],
            raw.drift,
            g,
            kernel=config.kernel,
            precision=dispatch.matmul_precision(config.precision),
            pairs=streamed.direct(raw.scale),
            isotropic=isotropic,
        )

    def by_products(raw, near, g):
        del raw
        return _near_backward(config, isotropic, near, g)

    d = lax.cond(_far(near), by_differences, by_products, raw, near, g)
    # z = (x - centre) h^-1/2 and c = repulsion h^-1/2.
    h = bandwidth.astype(g.dtype)
    own = d.drift * raw.drift
    if isotropic:
        d_bandwidth = -0.5 * (jnp.sum(d.log_scale) + jnp.sum(own)) / h
    else:
        d_bandwidth = -0.5 * (d.log_scale + own) / h
    d_particles, d_step_size = d.particles * raw.scale, None
    if step_size is not None:
        d_particles = cotangent + d_particles
        phi = direction(config, *inputs[:-1], None)
        d_step_size = jnp.sum(cotangent * phi.astype(g.dtype))
    return (
        d_particles.astype(particles.dtype),
        d.scores.astype(scores.dtype),
        d_bandwidth.astype(bandwidth.dtype),
        None,
        jnp.sum(d.drift * raw.scale),
        d_step_size,
    )


direction.defvjp(_direction_fwd, _direction_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _near_backward(config: Config, isotropic, near: _Standardised, cotangent) -> streamed.Gradient:
    return _backward_by(config.implementation, config, isotropic)(near, cotangent)


def _backward_by(implementation, config, isotropic):
    options = {"kernel": config.kernel, "precision": config.precision, "isotropic": isotropic}
    return functools.partial(dispatch.backward, implementation, **options)


def _near_backward_fwd(config, isotropic, near, cotangent):
    return _near_backward(config, isotropic, near, cotangent), (near, cotangent)


def _near_backward_bwd(config, isotropic, residuals, cotangent):
    # Second order: compiled kernels have no derivative, the streamed backward pass has.
    _, vjp = jax.vjp(_backward_by("xla", config, isotropic), *residuals)
    return vjp(cotangent)


_near_backward.defvjp(_near_backward_fwd, _near_backward_bwd)
