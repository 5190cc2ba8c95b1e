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


# --- standardised coordinates ----------------------------------------------------------------------


class _Standardised(NamedTuple):
    """z = (x - centre) / sqrt(h) for particles and queries, raw scores, drift = repulsion / sqrt(h)."""

    queries: jax.Array
    particles: jax.Array
    scores: jax.Array
    drift: jax.Array


def _standardise(particles, scores, bandwidth, queries, repulsion) -> _Standardised:
    """Centre first (phi is translation invariant, rounding is not), then scale by the bandwidth."""
    dtype = _compute_dtype(particles, scores)
    x, s, h = (a.astype(dtype) for a in (particles, scores, bandwidth))
    # Any centre gives the same phi, so it carries no derivative. It need not be finite: particles
    # that have left the domain must not hide behind it.
    centre = lax.stop_gradient(jnp.mean(x, axis=0))
    scale = lax.rsqrt(h)
    z = (x - centre) * scale
    y = z if queries is None else (queries.astype(dtype) - centre) * scale
    return _Standardised(y, z, s, jnp.broadcast_to(repulsion * scale, (x.shape[1],)))


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
    norms = (0.5 * jnp.max(jnp.sum(z * z, axis=1)) for z in (a.queries, a.particles))
    return _is_far(lax.stop_gradient(functools.reduce(jnp.maximum, norms)))


# --- the operation ---------------------------------------------------------------------------------


def _matmul_precision(precision: str) -> lax.Precision:
    """Set on every product: XLA's own default for float32 on a GPU is one pass of TF32."""
    return lax.Precision.DEFAULT if precision == "default" else lax.Precision.HIGHEST


def _streamed_forward(config: _Config, pairs, a: _Standardised):
    return streamed.forward(
        *a, kernel=config.kernel, precision=_matmul_precision(config.precision), pairs=pairs
    )


def _streamed_backward(config: _Config, pairs, a: _Standardised, cotangent):
    return streamed.backward(
        *a[1:],
        cotangent,
        kernel=config.kernel,
        precision=_matmul_precision(config.precision),
        pairs=pairs,
    )


def _dense(config: _Config, particles, scores, bandwidth, queries, repulsion):
    dtype = _compute_dtype(particles, scores)
    x, s, h = (a.astype(dtype) for a in (particles, scores, bandwidth))
    y = None if queries is None else queries.astype(dtype)
    phi = reference.direction(x, s, h, queries=y, kernel=config.kernel, repulsion=repulsion)
    return phi.astype(jnp.result_type(particles, scores))


def _primal(config: _Config, particles, scores, bandwidth, queries, repulsion):
    a = _standardise(particles, scores, bandwidth, queries, repulsion)
    phi = lax.cond(
        _far(a),
        functools.partial(_streamed_forward, config, streamed.DIRECT),
        functools.partial(_streamed_forward, config, streamed.PRODUCTS),
        a,
    )
    return phi.astype(jnp.result_type(particles, scores))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _direction(config: _Config, particles, scores, bandwidth, queries, repulsion):
    return _primal(config, particles, scores, bandwidth, queries, repulsion)


def _direction_fwd(config, *inputs):
    return _direction(config, *inputs), inputs


def _direction_bwd(config, inputs, cotangent):
    particles, scores, bandwidth, queries, repulsion = inputs
    if queries is not None:
        # Two sets of rows own the gradient here: XLA derives both passes from the streamed forward.
        _, vjp = jax.vjp(functools.partial(_primal, config), *inputs)
        return vjp(cotangent)
    a = _standardise(*inputs)
    g = cotangent.astype(a.particles.dtype)
    dz, ds, dc = lax.cond(
        _far(a),
        functools.partial(_streamed_backward, config, streamed.DIRECT),
        functools.partial(_streamed_backward, config, streamed.PRODUCTS),
        a,
        g,
    )
    # z = (x - centre) h^-1/2 and c = repulsion h^-1/2.
    h = bandwidth.astype(dz.dtype)
    scale = lax.rsqrt(h)
    dh = -0.5 * (jnp.sum(dz * a.particles, axis=0) + dc * a.drift) / h
    if h.ndim == 0:
        dh = jnp.sum(dh)
    return (
        (dz * scale).astype(particles.dtype),
        ds.astype(scores.dtype),
        dh.astype(bandwidth.dtype),
        None,
        jnp.sum(dc * scale),
    )


_direction.defvjp(_direction_fwd, _direction_bwd)
