"""Stein variational gradient descent in JAX: exact, streamed, fused, differentiable."""

from jsvgd import reference
from jsvgd.bandwidth import BandwidthRule, BandwidthSchedule, median_bandwidth
from jsvgd.direction import svgd_direction, svgd_update
from jsvgd.dispatch import which_implementation
from jsvgd.kernels import IMQ, RBF, RadialKernel
from jsvgd.loop import History, run
from jsvgd.sampler import SamplingAlgorithm, SVGDInfo, SVGDState, svgd
from jsvgd.transform import ScaleBySVGDState, scale_by_svgd

__version__ = "0.1.0"

__all__ = [
    "IMQ",
    "RBF",
    "BandwidthRule",
    "BandwidthSchedule",
    "History",
    "RadialKernel",
    "SVGDInfo",
    "SVGDState",
    "SamplingAlgorithm",
    "ScaleBySVGDState",
    "median_bandwidth",
    "reference",
    "run",
    "scale_by_svgd",
    "svgd",
    "svgd_direction",
    "svgd_update",
    "which_implementation",
]
