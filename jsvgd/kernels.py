"""Radial kernels k(x, y) = f(u) with u = sum_c (x_c - y_c)^2 / (2 h_c).

``h`` is a squared length (scalar, or one a dimension). SVGD needs the profile ``f`` itself, its slope
``w = -f'`` (the repulsion of two particles is ``w(u) (x - y) / h``), and for gradients its curvature
``f''``. A profile of your own is one line: ``RadialKernel("student", lambda u: 1 / (1 + u))``.

Kernels of every kind add up and take factors: ``RBF + 0.1 * LinearKernel()`` (``jsvgd.composite`` has
the kinds that are not radial).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["IMQ", "RBF", "Kernel", "KernelSum", "RadialKernel", "get_kernel"]

Profile = Callable[[jax.Array], jax.Array]


class Kernel:
    """What every kernel can do: be added to another one, and be multiplied by a number."""

    # An array of NumPy leaves the product to __rmul__, instead of multiplying element by element.
    __array_ufunc__ = None

    def __add__(self, other):
        if not isinstance(other, Kernel):
            return NotImplemented
        left, right = _terms(self), _terms(other)
        return KernelSum(left[0] + right[0], left[1] + right[1])

    def __mul__(self, factor):
        if isinstance(factor, Kernel):
            return NotImplemented
        weights, kernels = _terms(self)
        return KernelSum(tuple(factor * weight for weight in weights), kernels)

    __rmul__ = __mul__


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class KernelSum(Kernel):
    """sum_i weights_i kernels_i.

    A pytree whose leaves are the weights: they may be traced, differentiated and mapped over. All
    radial terms share one bandwidth; ``RadialKernel.widened`` gives a term a multiple of it.

    Attributes:
      weights: numbers >= 0, kept as Python's; traced scalars, and arrays that ``jax.vmap`` takes apart, as
        they are.
      kernels: as many kernels, none of them a sum.

    Raises:
      TypeError: for weights that are no real numbers and terms that are no kernels or sums themselves.
      ValueError: for weights below 0 or NaN, and another number of weights than of kernels.
    """

    weights: tuple
    kernels: tuple[Kernel, ...]

    def __post_init__(self):
        if len(self.weights) != len(self.kernels) or not self.kernels:
            raise ValueError(
                "a KernelSum needs one weight a kernel and at least one kernel, "
                f"got {len(self.weights)} weights and {len(self.kernels)} kernels"
            )
        for kernel in self.kernels:
            if not isinstance(kernel, Kernel) or isinstance(kernel, KernelSum):
                raise TypeError(f"the terms of a KernelSum must be single kernels, got {kernel!r}")
        object.__setattr__(self, "weights", tuple(_checked_weight(w) for w in self.weights))

    @property
    def name(self) -> str:
        return " + ".join(kernel.name for kernel in self.kernels)

    def tree_flatten(self):
        return self.weights, self.kernels

    @classmethod
    def tree_unflatten(cls, kernels, weights):
        # Without the checks: JAX fills in placeholders that are no numbers.
        kernel_sum = object.__new__(cls)
        object.__setattr__(kernel_sum, "weights", tuple(weights))
        object.__setattr__(kernel_sum, "kernels", kernels)
        return kernel_sum


def _checked_weight(weight):
    if isinstance(weight, jax.core.Tracer):
        return weight
    dtype = np.asarray(weight).dtype
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(f"weights of a KernelSum must be real numbers, got {weight!r}")
    if np.ndim(weight):
        return weight
    # A number of Python's is hashable, so the kernel can be a static argument of compiled functions.
    weight = float(weight)
    if not weight >= 0:
        raise ValueError(f"weights of a KernelSum must be at least 0, got {weight}")
    return weight


def _terms(kernel: Kernel) -> tuple[tuple, tuple[Kernel, ...]]:
    if isinstance(kernel, KernelSum):
        return kernel.weights, kernel.kernels
    return (1.0,), (kernel,)


@dataclasses.dataclass(frozen=True)
class RadialKernel(Kernel):
    """A kernel that depends on the scaled squared distance u >= 0 alone.

    Attributes:
      name: shown in error messages; ``"rbf"`` and ``"imq"`` select the compiled kernels.
      profile: elementwise ``f(u)``, positive definite as a radial function, smooth at 0.
      slope: elementwise ``-f'(u)``; by automatic differentiation where not given.
      curvature: elementwise ``f''(u)``; by automatic differentiation where not given.
    """

    name: str
    profile: Profile
    slope: Profile | None = None
    curvature: Profile | None = None

    def __post_init__(self):
        if not callable(self.profile):
            raise TypeError(
                f"profile of the kernel {self.name!r} must be a function of u, got {self.profile!r}"
            )
        if self.slope is None:
            object.__setattr__(self, "slope", _minus_derivative(self.profile))
        if self.curvature is None:
            object.__setattr__(self, "curvature", _minus_derivative(self.slope))

    def widened(self, factor: float) -> RadialKernel:
        """The same kernel at ``factor`` times the bandwidth: f(u / factor).

        Example:
          >>> scales = sum((RBF.widened(4.0**i) for i in range(1, 3)), start=1.0 * RBF)
          >>> scales.name
          'rbf + rbf(4 h) + rbf(16 h)'
        """
        if not factor > 0:
            raise ValueError(f"factor must be positive, got {factor}")
        return _widened(self, float(factor))


@functools.lru_cache
def _widened(kernel: RadialKernel, factor: float) -> RadialKernel:
    # Cached, so that one kernel stays one object: compiled functions are looked up by it.
    return RadialKernel(
        f"{kernel.name}({factor:g} h)",
        lambda u: kernel.profile(u / factor),
        lambda u: kernel.slope(u / factor) / factor,
        lambda u: kernel.curvature(u / factor) / factor**2,
    )


def _minus_derivative(function: Profile) -> Profile:
    def derivative(u):
        return -jax.jvp(function, (u,), (jnp.ones_like(u),))[1]

    return derivative


def _exp_minus(u):
    return jnp.exp(-u)


def _imq(u):
    return (1.0 + 2.0 * u) ** -0.5


def _imq_slope(u):
    return (1.0 + 2.0 * u) ** -1.5


def _imq_curvature(u):
    return 3.0 * (1.0 + 2.0 * u) ** -2.5


RBF = RadialKernel("rbf", _exp_minus, _exp_minus, _exp_minus)
"""exp(-|x - y|^2 / (2 h))."""

IMQ = RadialKernel("imq", _imq, _imq_slope, _imq_curvature)
"""(1 + |x - y|^2 / h)^(-1/2), the inverse multiquadric of Gorham and Mackey (2017, section 4).

It has the curvature of the rbf kernel at 0, so one bandwidth means the same length for both.
"""

_NAMED = {kernel.name: kernel for kernel in (RBF, IMQ)}


def get_kernel(kernel: str | RadialKernel) -> RadialKernel:
    """The radial kernel of that name, or the kernel itself.

    ``jsvgd.composite.as_kernel`` takes kernels of every kind.

    Raises:
      ValueError: for an unknown name.
      TypeError: for anything that is neither a name nor a ``RadialKernel``.
    """
    if isinstance(kernel, RadialKernel):
        return kernel
    if not isinstance(kernel, str):
        raise TypeError(
            f"kernel must be one of {sorted(_NAMED)} or a RadialKernel, got {type(kernel).__name__}"
        )
    if kernel not in _NAMED:
        raise ValueError(
            f"kernel must be one of {sorted(_NAMED)} or a RadialKernel, got {kernel!r}"
        )
    return _NAMED[kernel]
