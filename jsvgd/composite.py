"""Kernels that are not radial, and the direction of weighted sums of kernels.

The direction is linear in the kernel, so a sum of kernels is a sum of directions: radial terms go through
the streamed or compiled implementations, the linear kernel has a closed form, and any other function
k(x, y) is differentiated by JAX, a block of rows at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jsvgd.kernels import Kernel, KernelSum, RadialKernel, get_kernel
from jsvgd.streamed import map_row_blocks

__all__ = [
    "FunctionKernel",
    "LinearKernel",
    "as_kernel",
    "direction",
    "divergence_remainder",
    "terms_of",
]


@dataclasses.dataclass(frozen=True)
class LinearKernel(Kernel):
    """k(x, y) = offset + (x - m).(y - m), m the mean of the particles.

    It alone matches the first two moments of the target (Liu and Wang, 2018), whatever the number of
    particles, and nothing else: add a little of it to a radial kernel. It has no bandwidth: its unit is
    that of the particles, so it belongs with a preconditioner (or standardised particles).

    Attributes:
      offset: > 0, weight of the constant kernel.
      centred: False leaves m at 0.
    """

    offset: float = 1.0
    centred: bool = True

    name = "linear"

    def __post_init__(self):
        if isinstance(self.offset, (int, float)) and not self.offset > 0:
            raise ValueError(f"offset of a LinearKernel must be positive, got {self.offset}")

    def origin(self, particles: jax.Array) -> jax.Array:
        """m, (d,)."""
        if self.centred:
            return jnp.mean(particles, axis=0)
        return jnp.zeros_like(particles[0])


@dataclasses.dataclass(frozen=True)
class FunctionKernel(Kernel):
    """Any positive definite k(x, y) of two particles (d,), returning a scalar; differentiable in x.

    It keeps its own length scale: the bandwidth is not passed to it. N^2 d work that no compiled kernel
    takes over, in O(N d) memory.

    Attributes:
      function: the kernel.
      name: shown in messages.

    Example:
      >>> import jax.numpy as jnp
      >>> cosine = FunctionKernel(lambda x, y: jnp.cos(x - y).mean(), "cosine")
      >>> from jsvgd.kernels import RBF
      >>> (RBF + 0.5 * cosine).name
      'rbf + cosine'
    """

    function: Callable[[jax.Array, jax.Array], jax.Array]
    name: str = "function"

    def __post_init__(self):
        if not callable(self.function):
            raise TypeError(f"function must be a function k(x, y), got {self.function!r}")


def as_kernel(kernel) -> Kernel:
    """The kernel that a user means: a name ("rbf", "imq", "linear"), a ``Kernel``, or a function k(x, y).

    Raises:
      ValueError: for an unknown name.
      TypeError: for anything else.
    """
    if isinstance(kernel, Kernel):
        return kernel
    if isinstance(kernel, str):
        if kernel == "linear":
            return LinearKernel()
        try:
            return get_kernel(kernel)
        except ValueError:
            raise ValueError(
                f"kernel must be one of ['imq', 'linear', 'rbf'], a RadialKernel, a sum of kernels "
                f"or a function k(x, y), got {kernel!r}"
            ) from None
    if callable(kernel):
        return FunctionKernel(kernel, getattr(kernel, "__name__", "function"))
    raise TypeError(
        "kernel must be one of ['imq', 'linear', 'rbf'], a RadialKernel, a sum of kernels or a "
        f"function k(x, y), got {type(kernel).__name__}"
    )


def terms_of(kernel: Kernel) -> list[tuple[object, Kernel]]:
    """(weight, kernel) of every term; one term of weight 1 where the kernel is no sum.

    Raises:
      ValueError: for a weight that is no scalar.
    """
    if isinstance(kernel, KernelSum):
        for weight in kernel.weights:
            if jnp.ndim(weight):
                raise ValueError(
                    f"weights of a KernelSum must be scalars, got one of shape {jnp.shape(weight)}"
                )
        return list(zip(kernel.weights, kernel.kernels, strict=True))
    return [(1.0, kernel)]


def direction(
    radial: Callable[[RadialKernel], jax.Array],
    particles: jax.Array,
    scores: jax.Array,
    queries: jax.Array | None,
    *,
    kernel: Kernel,
    repulsion: jax.Array,
    precision: lax.Precision,
) -> jax.Array:
    """phi of a kernel of any kind, (M, d), in the dtype of the inputs.

    Args:
      radial: gives the direction of a radial kernel on the same arguments.
      particles, scores: (N, d), float32 or float64.
      queries: (M, d), or None for the particles.
      kernel: any ``Kernel``.
      repulsion: a scalar.
      precision: of the matrix products of the linear kernel and of functions.
    """
    y = particles if queries is None else queries
    total = jnp.zeros_like(y)
    for weight, term in terms_of(kernel):
        if isinstance(term, RadialKernel):
            phi = radial(term)
        elif isinstance(term, LinearKernel):
            phi = _linear(term, y, particles, scores, repulsion, precision)
        elif isinstance(term, FunctionKernel):
            phi = _function(term.function, y, particles, scores, repulsion, precision)
        else:
            raise TypeError(f"svgd_direction has no rule for the kernel {term!r}")
        total += jnp.asarray(weight, total.dtype) * phi.astype(total.dtype)
    return total


def divergence_remainder(
    particles: jax.Array, *, kernel: Kernel, moving: bool = False
) -> jax.Array:
    """(N, d), what the divergence sum_j d/dx_j k(x_j, x_i) has beyond the direction's repulsion.

    The term j = i of the divergence of the matrix k(x_i, x_j) depends on x_i through both arguments; the
    direction has one of them. Zero for radial kernels and the centred linear one, whose moving mean
    takes away just as much.

    Args:
      particles: (N, d).
      kernel: any ``Kernel``; functions must be symmetric.
      moving: True where ``particles`` are differences from their own mean, which moves with every one.
    """
    total = jnp.zeros_like(particles)
    for weight, term in terms_of(kernel):
        if isinstance(term, FunctionKernel):
            remainder = _function_remainder(term.function, particles, moving)
        elif isinstance(term, LinearKernel) and not term.centred and not moving:
            remainder = particles
        else:
            continue
        total += jnp.asarray(weight, total.dtype) * remainder
    return total


def _function_remainder(function, particles, moving):
    n, d = particles.shape
    # Symmetric: at (x, x) the derivative in the second argument is that in the first.
    push = jax.grad(function)
    own = jax.vmap(push)(particles, particles)
    if not moving:
        return own

    def block(rows):
        def shifted(x, y):
            return push(x, y) + push(y, x)

        pairs = jax.vmap(jax.vmap(shifted, (None, 0)), (0, None))(rows, particles)
        return jnp.mean(pairs, axis=1)

    return own - map_row_blocks(block, (particles,), n * d)


def _linear(kernel, queries, particles, scores, repulsion, precision):
    """offset mean(s) + (y - m) [ X^T S / N + repulsion I ], X the particles less m."""
    n, d = particles.shape
    origin = kernel.origin(particles)
    x, y = particles - origin, queries - origin
    if d <= n:
        drive = jnp.matmul(y, jnp.matmul(x.T, scores, precision=precision) / n, precision=precision)
    else:
        # Few particles of a large network: N x N products instead of a d x d matrix.
        weights = jnp.matmul(y, x.T, precision=precision) / n
        drive = jnp.matmul(weights, scores, precision=precision)
    return kernel.offset * jnp.mean(scores, axis=0) + drive + repulsion * y


def _function(function, queries, particles, scores, repulsion, precision):
    n, d = particles.shape
    value_and_push = jax.vmap(jax.value_and_grad(function), (0, None))

    def block(rows):
        weights, push = jax.vmap(value_and_push, (None, 0))(particles, rows)
        attraction = jnp.matmul(weights, scores, precision=precision)
        return (attraction + repulsion * jnp.sum(push, axis=1)) / n

    return map_row_blocks(block, (queries,), n * d)
