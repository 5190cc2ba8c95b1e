"""The SVGD direction and update as a user calls them: arguments checked, implementation chosen."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jsvgd import composite, dispatch, operation
from jsvgd.arguments import check_bandwidth, check_matrix, check_real
from jsvgd.coordinates import FAR_BACKWARD, compute_dtype
from jsvgd.kernels import Kernel, RadialKernel
from jsvgd.operation import Config

__all__ = ["svgd_direction", "svgd_update"]


def svgd_direction(
    particles: jax.Array,
    scores: jax.Array,
    bandwidth: jax.Array | float,
    *,
    queries: jax.Array | None = None,
    kernel: str | Kernel | Callable = "rbf",
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
    ``jax.jacfwd``) choose ``implementation="xla"``, which XLA's own rules differentiate in both modes: the
    first derivative in O(N d) memory too, the second not.

    Args:
      particles: x, (N, d), a floating dtype. bfloat16 and float16 are computed in float32, float64 in
        float64.
      scores: s, (N, d), grad log p at the particles.
      bandwidth: h > 0, a squared length: a scalar, or (d,) for one a dimension.
      queries: y, (M, d); where absent the particles themselves.
      kernel: "rbf", "imq", a ``RadialKernel``; "linear" (closed form, O(N d^2), no bandwidth); a weighted
        sum of kernels, ``RBF + 0.1 * LinearKernel()``; or a function k(x, y) of two particles (d,),
        which runs through XLA.
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
        not "xla" or "dense" (under ``jax.jit`` in JAX's own words about a custom_vjp).

    Example:
      >>> import jax, jsvgd
      >>> x = jax.random.normal(jax.random.key(0), (100, 3))
      >>> jsvgd.svgd_direction(x, -x, jsvgd.median_bandwidth(x)).shape
      (100, 3)
    """
    return _dispatch(
        particles,
        scores,
        bandwidth,
        queries=queries,
        kernel=kernel,
        repulsion=repulsion,
        precision=precision,
        implementation=implementation,
    )


def svgd_update(
    particles: jax.Array,
    scores: jax.Array,
    bandwidth: jax.Array | float,
    step_size: jax.Array | float,
    *,
    kernel: str | Kernel | Callable = "rbf",
    repulsion: jax.Array | float = 1.0,
    precision: str = "high",
    implementation: str | None = None,
) -> jax.Array:
    """One plain SVGD step, particles + step_size * phi(particles).

    Args:
      particles, scores, bandwidth: as in ``svgd_direction``.
      step_size: a scalar (fused into the kernel), or an array that broadcasts to (N, d).
      kernel, repulsion, precision, implementation: as in ``svgd_direction``.

    Returns:
      (N, d), in the dtype of the particles (promoted with that of the scores).

    Raises:
      ValueError, TypeError: as ``svgd_direction``, and for a step size that does not broadcast.
    """
    options = {
        "kernel": kernel,
        "repulsion": repulsion,
        "precision": precision,
        "implementation": implementation,
    }
    particles, scores = check_matrix("particles", particles), check_matrix("scores", scores)
    dtype = compute_dtype(particles, scores)
    step_size = check_real("step_size", step_size, dtype)
    if step_size.ndim == 0:
        return _dispatch(particles, scores, bandwidth, step_size=step_size, **options)
    try:
        step_size = jnp.broadcast_to(step_size, particles.shape)
    except ValueError:
        raise ValueError(
            f"step_size must be a scalar or broadcast to the shape of particles, {particles.shape}, "
            f"got {step_size.shape}"
        ) from None
    phi = _dispatch(particles, scores, bandwidth, **options)
    return (particles.astype(dtype) + step_size * phi.astype(dtype)).astype(phi.dtype)


def _dispatch(
    particles,
    scores,
    bandwidth,
    *,
    queries=None,
    kernel="rbf",
    repulsion=1.0,
    precision="high",
    implementation=None,
    step_size=None,
):
    """The direction, or particles + step_size * direction, for unchecked arguments."""
    kernel = composite.as_kernel(kernel)
    if not isinstance(kernel, RadialKernel):
        return _composite(
            particles,
            scores,
            bandwidth,
            queries=queries,
            kernel=kernel,
            repulsion=repulsion,
            precision=precision,
            implementation=implementation,
            step_size=step_size,
        )
    particles, scores, queries, bandwidth = _check_arrays(particles, scores, queries, bandwidth)
    config = _check_config(
        particles,
        scores,
        queries,
        kernel=kernel,
        precision=precision,
        implementation=implementation,
    )
    repulsion = _check_repulsion(repulsion, compute_dtype(particles, scores))
    inputs = (particles, scores, bandwidth, queries, repulsion, step_size)
    if config.implementation == "dense":
        return operation.dense(config, *inputs)
    if implementation == "xla":
        # By XLA's own operations throughout, so that forward mode works too; it is also what XLA
        # differentiates, so particles count as far where their gradient says so.
        return operation.evaluate(config._replace(far=FAR_BACKWARD), *inputs)
    try:
        return operation.direction(config, *inputs)
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            "svgd_direction is differentiated in forward mode (jvp, jacfwd, hessian), which its "
            'custom_vjp does not have; pass implementation="xla", which does'
        ) from error


def _composite(
    particles,
    scores,
    bandwidth,
    *,
    queries,
    kernel,
    repulsion,
    precision,
    implementation,
    step_size,
):
    """``_dispatch`` for kernels that are not radial: their radial terms come back to it."""
    radial = any(isinstance(term, RadialKernel) for _, term in composite.terms_of(kernel))
    # Only radial kernels have a bandwidth to check.
    h = bandwidth if radial else 1.0
    particles, scores, queries, h = _check_arrays(particles, scores, queries, h)
    dispatch.check_names(precision, implementation)
    dtype = compute_dtype(particles, scores)
    x, s = particles.astype(dtype), scores.astype(dtype)
    y = None if queries is None else queries.astype(dtype)
    options = {"precision": precision, "implementation": implementation}
    phi = composite.direction(
        lambda term: _dispatch(x, s, h, queries=y, kernel=term, repulsion=repulsion, **options),
        x,
        s,
        y,
        kernel=kernel,
        repulsion=_check_repulsion(repulsion, dtype),
        precision=dispatch.matmul_precision(precision),
    )
    if step_size is not None:
        phi = x + step_size * phi
    return phi.astype(jnp.result_type(particles, scores))


def _check_repulsion(repulsion, dtype) -> jax.Array:
    repulsion = check_real("repulsion", repulsion, dtype)
    if repulsion.ndim:
        raise ValueError(f"repulsion must be a scalar, got shape {repulsion.shape}")
    return repulsion


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


def _check_config(particles, scores, queries, *, kernel, precision, implementation) -> Config:
    dispatch.check_names(precision, implementation)
    dtype = compute_dtype(particles, scores)
    n, d = particles.shape
    m = None if queries is None else queries.shape[0]
    options = {"dtype": dtype, "kernel": kernel, "precision": precision}
    if implementation is None:
        choose = functools.partial(
            dispatch.choose, n, m, d, platform=jax.default_backend(), **options
        )
        choices = choose().implementation, choose(backward=True).implementation
        return Config(kernel, precision, *choices)
    takes, why_not = dispatch.supports(implementation, n, d, m=m, **options)
    if not takes:
        raise ValueError(f"implementation={implementation!r} does not take this: {why_not}")
    return Config(kernel, precision, implementation, implementation)
