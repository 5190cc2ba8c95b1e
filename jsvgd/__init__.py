"""Stein variational gradient descent in JAX: exact, streamed, fused, differentiable."""

from jsvgd import reference
from jsvgd.direction import svgd_direction, svgd_update
from jsvgd.dispatch import which_implementation
from jsvgd.kernels import IMQ, RBF, RadialKernel

__version__ = "0.1.0"

__all__ = [
    "IMQ",
    "RBF",
    "RadialKernel",
    "reference",
    "svgd_direction",
    "svgd_update",
    "which_implementation",
]
