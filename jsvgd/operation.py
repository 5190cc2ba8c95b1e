"""The differentiable operation itself: the near and the far path, custom_vjp.

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

from jsvgd import compiled, coordinates, dispatch, reference, streamed
from jsvgd.coordinates import Raw
from jsvgd.kernels import RadialKernel

__all__ = ["Config", "dense", "direction", "evaluate"]


class Config(NamedTuple):
    """What is fixed when the operation is compiled."""

    kernel: RadialKernel
    precision: str
    implementation: str
    gradient_by: str  # the implementation that makes the gradient, where it takes the shapes
    far: float = coordinates.FAR  # max|z|^2 / 2 beyond which XLA's direction takes differences


@functools.partial(jax.jit, static_argnums=0)
def dense(config: Config, particles, scores, bandwidth, queries, repulsion, step_size):
    raw = coordinates.raw(particles, scores, bandwidth, queries, repulsion)
    phi = reference.direction(
        raw.particles,
        raw.scores,
        bandwidth.astype(raw.particles.dtype),
        queries=raw.queries,
        kernel=config.kernel,
        repulsion=repulsion,
    )
    return _stepped(raw, phi, step_size).astype(jnp.result_type(particles, scores))


def _stepped(raw: Raw, phi, step_size):
    return phi if step_size is None else raw.particles + step_size * phi


@functools.partial(jax.jit, static_argnums=0)
def evaluate(config: Config, particles, scores, bandwidth, queries, repulsion, step_size):
    raw = coordinates.raw(particles, scores, bandwidth, queries, repulsion)
    if config.implementation == "xla":
        result = _stepped(raw, _streamed(config, raw), step_size)
    else:
        result = compiled.forward(
            config.implementation,
            raw,
            step_size,
            kernel=config.kernel,
            precision=config.precision,
        )
    return result.astype(jnp.result_type(particles, scores))


def _far_or_near(config: Config, limit: float, raw: Raw, function, *operands):
    """function(arrays, *operands, kernel, precision, pairs) on coordinates that have the digits."""
    options = {
        "kernel": config.kernel,
        "precision": dispatch.matmul_precision(config.precision),
    }

    def by_differences(raw, near, *operands):
        del near
        arrays = (*raw[:3], raw.drift)
        return function(arrays, *operands, pairs=streamed.direct(raw.scale), **options)

    def by_products(raw, near, *operands):
        del raw
        return function(near, *operands, pairs=streamed.PRODUCTS, **options)

    near = coordinates.standardise(raw)
    far = coordinates.any_beyond(limit, coordinates.half_reach(near))
    return lax.cond(far, by_differences, by_products, raw, near, *operands)


def _streamed(config: Config, raw: Raw) -> jax.Array:
    forward = lambda arrays, **options: streamed.forward(*arrays, **options)
    return _far_or_near(config, config.far, raw, forward)


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
        by_xla = config._replace(implementation="xla", far=coordinates.FAR_BACKWARD)
        _, vjp = jax.vjp(functools.partial(evaluate, by_xla), *inputs)
        return vjp(cotangent)
    raw = coordinates.raw(*inputs[:-1])
    cotangent = cotangent.astype(raw.particles.dtype)
    g = cotangent if step_size is None else step_size * cotangent
    isotropic = bandwidth.ndim == 0
    takes, _ = dispatch.supports(
        config.gradient_by,
        *particles.shape,
        dtype=raw.particles.dtype,
        kernel=config.kernel,
        precision=config.precision,
        backward=True,
    )
    backward = _compiled_backward if takes else _streamed_backward
    d = backward(config, isotropic, raw, g)
    # z = (x - centre) h^-1/2 and c = repulsion h^-1/2; one h for all dimensions has their sums.
    scale, drift = (v[:1] if isotropic else v for v in (raw.scale, raw.drift))
    d_bandwidth = -0.5 * (d.log_scale + d.drift * drift) / bandwidth.astype(g.dtype)
    d_particles, d_step_size = d.particles * raw.scale, None
    if step_size is not None:
        d_particles = cotangent + d_particles
        phi = direction(config, *inputs[:-1], None)
        d_step_size = jnp.sum(cotangent * phi.astype(g.dtype))
    return (
        d_particles.astype(particles.dtype),
        d.scores.astype(scores.dtype),
        d_bandwidth.reshape(bandwidth.shape).astype(bandwidth.dtype),
        None,
        jnp.sum(d.drift * scale),
        d_step_size,
    )


direction.defvjp(_direction_fwd, _direction_bwd)


def _streamed_backward(config: Config, isotropic, raw: Raw, cotangent) -> streamed.Gradient:
    def backward(arrays, g, **options):
        _, particles, scores, drift = arrays
        return streamed.backward(particles, scores, drift, g, isotropic=isotropic, **options)

    return _far_or_near(config, coordinates.FAR_BACKWARD, raw, backward, cotangent)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _compiled_backward(config: Config, isotropic, raw: Raw, cotangent) -> streamed.Gradient:
    return compiled.backward(
        config.gradient_by,
        raw,
        cotangent,
        kernel=config.kernel,
        precision=config.precision,
        isotropic=isotropic,
    )


def _compiled_backward_fwd(config, isotropic, raw, cotangent):
    return _compiled_backward(config, isotropic, raw, cotangent), (raw, cotangent)


def _compiled_backward_bwd(config, isotropic, residuals, cotangent):
    # Second order: compiled kernels have no derivative, the streamed backward pass has.
    _, vjp = jax.vjp(functools.partial(_streamed_backward, config, isotropic), *residuals)
    return vjp(cotangent)


_compiled_backward.defvjp(_compiled_backward_fwd, _compiled_backward_bwd)
