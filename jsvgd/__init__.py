"""Stein variational gradient descent in JAX: exact, streamed, fused, differentiable."""

from jsvgd import reference
from jsvgd.arviz_export import to_arviz
from jsvgd.bandwidth import BandwidthRule, BandwidthSchedule, median_bandwidth
from jsvgd.checkpoint import Checkpoint
from jsvgd.direction import svgd_direction, svgd_update
from jsvgd.dispatch import which_implementation
from jsvgd.groups import scale_by_svgd_per_group
from jsvgd.kernels import IMQ, RBF, RadialKernel
from jsvgd.loop import History, run
from jsvgd.sampler import SamplingAlgorithm, SVGDInfo, SVGDState, svgd
from jsvgd.stopping import StopOnKSD, StopOnMovement
from jsvgd.transform import ScaleBySVGDState, scale_by_svgd

__version__ = "0.1.0"

__all__ = [
    "IMQ",
    "RBF",
    "BandwidthRule",
    "BandwidthSchedule",
    "Checkpoint",
    "History",
    "RadialKernel",
    "SVGDInfo",
    "SVGDState",
    "SamplingAlgorithm",
    "ScaleBySVGDState",
    "StopOnKSD",
    "StopOnMovement",
    "median_bandwidth",
    "reference",
    "run",
    "scale_by_svgd",
    "scale_by_svgd_per_group",
    "svgd",
    "svgd_direction",
    "svgd_update",
    "to_arviz",
    "which_implementation",
]
