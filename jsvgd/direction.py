"""The differentiable SVGD operation: checks, centring, choice of implementation, custom_vjp."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jsvgd import dispatch, reference, streamed
from jsvgd.arguments import check_bandwidth, check_matrix
from jsvgd.kernels import RadialKernel, get_kernel

__all__ = ["svgd_direction", "svgd_update"]

# Above this max|z|^2 / 2 the expansion |x|^2 + |y|^2 - 2xy has lost more than ten of its bits, and the
# pairs are computed by direct differences instead.
FAR = 1000.0


def svgd_direction(
    particles: jax.Array,
    scores: jax.Array,
    bandwidth: jax.Array | float,
    *,
    queries: jax.Array | None = None,
    kernel: str | RadialKernel = "rbf",
    repulsion: jax.Array | float = 1.0,
    precision: str = "high",
    implementation: str | None = None,
) -> jax.Array:
    r"""The SVGD direction phi, exact, in O(N d) memory, with a gradient.

    .. math:: \phi(y_i) = \frac1N \sum_j \left[ k(x_j, y_i) s_j
                          + r \nabla_{x_j} k(x_j, y_i) \right]

    Liu and Wang (2016), equation 8, with r = ``repulsion``; for the rbf kernel
    k(x, y) = exp(-|x - y|^2 / (2 h)). Coincident particles repel each other by nothing and stay finite;
    one particle follows its score.

    Differentiable in reverse mode in particles, scores, bandwidth, queries and repulsion, to any order;
    the backward pass is one streamed pass that stores only the inputs. For forward mode (``jax.jvp``,
    ``jax.jacfwd``) choose ``implementation="xla"``.

    Args:
      particles: x, (N, d), a floating dtype. bfloat16 and float16 are computed in float32, float64 in
        float64.
      scores: s, (N, d), grad log p at the particles.
      bandwidth: h > 0, a squared length: a scalar, or (d,) for one a dimension.
      queries: y, (M, d); where absent the particles themselves.
      kernel: "rbf", "imq" or a ``RadialKernel``.
      repulsion: r, a scalar. 0 leaves the attraction alone, -1 is the sign error of
        ``jsvgd.reference.pytorch_direction``.
      precision: of the matrix products: "highest" (IEEE float32), "high" (float32-class by several
        tensor-core products), "default" (one tensor-core product).
      implementation: None for the best one for platform, shapes and dtype (``which_implementation``
        tells), or "mosaic_gpu", "triton", "xla", "dense", "interpret".

    Returns:
      phi, (M, d), in the dtype of the particles (promoted with that of the scores).

    Raises:
      ValueError: for wrong ranks or shapes, no particles, a concrete bandwidth <= 0, unknown names.
      TypeError: for dtypes that are not floating point; in forward mode where ``implementation`` is
        not "xla" or "dense".

    Example:
      >>> import jax, jsvgd
      >>> x = jax.random.normal(jax.random.key(0), (100, 3))
      >>> jsvgd.svgd_direction(x, -x, jsvgd.median_bandwidth(x)).shape
      (100, 3)
    """
    particles, scores, queries, bandwidth = _check_arrays(particles, scores, queries, bandwidth)
    config = _check_config(
        particles,
        scores,
        queries,
        kernel=kernel,
        precision=precision,
        implementation=implementation,
    )
    repulsion = jnp.asarray(repulsion, dtype=_compute_dtype(particles, scores))
    if repulsion.ndim:
        raise ValueError(f"repulsion must be a scalar, got shape {repulsion.shape}")
    if implementation == "dense":
        return _dense(config, particles, scores, bandwidth, queries, repulsion)
    if implementation == "xla":
        # By XLA's own operations throughout, so that forward mode works too.
        return _primal(config, particles, scores, bandwidth, queries, repulsion)
    try:
        return _direction(config, particles, scores, bandwidth, queries, repulsion)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            "svgd_direction is differentiated in forward mode (jvp, jacfwd, hessian), which its "
            'custom_vjp does not have; pass implementation="xla", which does'
        ) from error


def svgd_update(
    particles: jax.Array,
    scores: jax.Array,
    bandwidth: jax.Array | float,
    step_size: jax.Array | float,
    **options,
) -> jax.Array:
    """One plain SVGD step, particles + step_size * phi(particles).

    Args:
      particles, scores, bandwidth: as in ``svgd_direction``.
      step_size: a scalar, or anything that broadcasts against (N, d).
      **options: kernel, repulsion, precision and implementation of ``svgd_direction``.

    Returns:
      (N, d), in the dtype of the particles.
    """
    if options.get("queries") is not None:
        raise ValueError("queries do not apply to svgd_update: it moves the particles themselves")
    phi = svgd_direction(particles, scores, bandwidth, **options)
    dtype = _compute_dtype(particles, scores)
    moved = jnp.asarray(particles, dtype) + jnp.asarray(step_size, dtype) * phi.astype(dtype)
    return moved.astype(phi.dtype)


class _Config(NamedTuple):
    kernel: RadialKernel
    precision: str
    implementation: str


# --- checks ---------------------------------------------------------------------------------------


def _check_arrays(particles, scores, queries, bandwidth):
    particles = check_matrix("particles", particles)
    scores = check_matrix("scores", scores)
    if scores.shape != particles.shape:
        raise ValueError(
            f"scores must have the shape of particles, {particles.shape}, got {scores.shape}"
        )
    if queries is not None:
        queries = check_matrix("queries", queries)
        if queries.shape[1] != particles.shape[1]:
            raise ValueError(
                f"queries must have shape (M, {particles.shape[1]}) to go with particles of shape "
                f"{particles.shape}, got {queries.shape}"
            )
    return particles, scores, queries, check_bandwidth(bandwidth, particles.shape[1])


def _check_config(particles, scores, queries, *, kernel, precision, implementation) -> _Config:
    kernel = get_kernel(kernel)
    if precision not in dispatch.PRECISIONS:
        raise ValueError(f"precision must be one of {dispatch.PRECISIONS}, got {precision!r}")
    if implementation is None:
        n, d = particles.shape
        implementation = dispatch.choose(
            n,
            n if queries is None else queries.shape[0],
            d,
            dtype=_compute_dtype(particles, scores),
            kernel=kernel,
            precision=precision,
            platform=jax.default_backend(),
        ).implementation
    elif implementation not in dispatch.IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be None or one of {dispatch.IMPLEMENTATIONS}, "
            f"got {implementation!r}"
        )
    return _Config(kernel, precision, implementation)


def _compute_dtype(*arrays):
    """float64 where the inputs are, float32 for everything narrower."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


# --- coordinates -----------------------------------------------------------------------------------


class _Raw(NamedTuple):
    """The inputs in the dtype of the computation, scale = h^-1/2 and drift = repulsion h^-1/2, (d,)."""

    queries: jax.Array
    particles: jax.Array
    scores: jax.Array
    scale: jax.Array
    drift: jax.Array


class _Standardised(NamedTuple):
    """z = (x - centre) scale for queries and particles, raw scores, drift."""

    queries: jax.Array
    particles: jax.Array
    scores: jax.Array
    drift: jax.Array


def _raw(particles, scores, bandwidth, queries, repulsion) -> _Raw:
    dtype = _compute_dtype(particles, scores)
    x, s, h = (a.astype(dtype) for a in (particles, scores, bandwidth))
    y = x if queries is None else queries.astype(dtype)
    scale = jnp.broadcast_to(lax.rsqrt(h), (x.shape[1],))
    return _Raw(y, x, s, scale, repulsion * scale)


def _standardise(raw: _Raw) -> _Standardised:
    """Centre first (phi is translation invariant, rounding is not), then scale by the bandwidth."""
    # Any centre gives the same phi, so it carries no derivative.
    centre = lax.stop_gradient(jnp.mean(raw.particles, axis=0))
    z = (raw.particles - centre) * raw.scale
    y = z if raw.queries is raw.particles else (raw.queries - centre) * raw.scale
    return _Standardised(y, z, raw.scores, raw.drift)


@jax.custom_batching.custom_vmap
def _is_far(half_squared_norm):
    return half_squared_norm > FAR


@_is_far.def_vmap
def _any_is_far(axis_size, in_batched, half_squared_norm):
    # One answer for the whole batch: under vmap a batched lax.cond would run both of its branches.
    # The far path is right for near particles too.
    del axis_size, in_batched
    return _is_far(jnp.max(half_squared_norm, axis=0)), False


def _far(a: _Standardised):
    norms = [0.5 * jnp.max(jnp.sum(z * z, axis=1)) for z in (a.queries, a.particles)]
    return _is_far(lax.stop_gradient(jnp.maximum(*norms)))


# --- the operation ---------------------------------------------------------------------------------


def _matmul_precision(precision: str) -> lax.Precision:
    """Set on every product: XLA's own default for float32 on a GPU is one pass of TF32."""
    return lax.Precision.DEFAULT if precision == "default" else lax.Precision.HIGHEST


@functools.partial(jax.jit, static_argnums=0)
def _dense(config: _Config, particles, scores, bandwidth, queries, repulsion):
    dtype = _compute_dtype(particles, scores)
    x, s, h = (a.astype(dtype) for a in (particles, scores, bandwidth))
    y = None if queries is None else queries.astype(dtype)
    phi = reference.direction(x, s, h, queries=y, kernel=config.kernel, repulsion=repulsion)
    return phi.astype(jnp.result_type(particles, scores))


@functools.partial(jax.jit, static_argnums=0)
def _primal(config: _Config, particles, scores, bandwidth, queries, repulsion):
    raw = _raw(particles, scores, bandwidth, queries, repulsion)
    near = _standardise(raw)
    options = {"kernel": config.kernel, "precision": _matmul_precision(config.precision)}

    def by_differences(raw, near):
        del near
        pairs = streamed.direct(raw.scale)
        return streamed.forward(*raw[:3], raw.drift, pairs=pairs, **options)

    def by_products(raw, near):
        del raw
        return streamed.forward(*near, **options)

    phi = lax.cond(_far(near), by_differences, by_products, raw, near)
    return phi.astype(jnp.result_type(particles, scores))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _direction(config: _Config, particles, scores, bandwidth, queries, repulsion):
    return _primal(config, particles, scores, bandwidth, queries, repulsion)


def _direction_fwd(config, *inputs):
    return _direction(config, *inputs), inputs


@functools.partial(jax.jit, static_argnums=0)
def _direction_bwd(config, inputs, cotangent):
    particles, scores, bandwidth, queries, _ = inputs
    if queries is not None:
        # Two sets of rows own the gradient here: XLA derives both passes from the streamed forward.
        _, vjp = jax.vjp(functools.partial(_primal, config), *inputs)
        return vjp(cotangent)
    raw = _raw(*inputs)
    near = _standardise(raw)
    g = cotangent.astype(raw.particles.dtype)
    options = {"kernel": config.kernel, "precision": _matmul_precision(config.precision)}

    def by_differences(raw, near, g):
        del near
        pairs = streamed.direct(raw.scale)
        return streamed.backward(*raw[1:3], raw.drift, g, pairs=pairs, **options)

    def by_products(raw, near, g):
        del raw
        return streamed.backward(*near[1:], g, **options)

    d = lax.cond(_far(near), by_differences, by_products, raw, near, g)
    # z = (x - centre) h^-1/2 and c = repulsion h^-1/2.
    h = bandwidth.astype(g.dtype)
    d_bandwidth = -0.5 * (d.log_scale + d.drift * raw.drift) / h
    if h.ndim == 0:
        d_bandwidth = jnp.sum(d_bandwidth)
    return (
        (d.particles * raw.scale).astype(particles.dtype),
        d.scores.astype(scores.dtype),
        d_bandwidth.astype(bandwidth.dtype),
        None,
        jnp.sum(d.drift * raw.scale),
    )


_direction.defvjp(_direction_fwd, _direction_bwd)
