"""Radial kernels k(x, y) = f(u) with u = sum_c (x_c - y_c)^2 / (2 h_c).

``h`` is a squared length (scalar, or one a dimension). SVGD needs the profile ``f`` itself, its slope
``w = -f'`` (the repulsion of two particles is ``w(u) (x - y) / h``), and for gradients its curvature
``f''``. A profile of your own is one line: ``RadialKernel("student", lambda u: 1 / (1 + u))``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

__all__ = ["IMQ", "RBF", "RadialKernel", "get_kernel"]

Profile = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class RadialKernel:
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
    """The kernel of that name, or the kernel itself.

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
