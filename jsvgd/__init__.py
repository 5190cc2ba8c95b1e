"""Stein variational gradient descent in JAX: exact, streamed, fused, differentiable."""

from jsvgd import reference
from jsvgd.arviz_export import to_arviz
from jsvgd.bandwidth import BandwidthRule, BandwidthSchedule, median_bandwidth
from jsvgd.checkpoint import Checkpoint
from jsvgd.composite import FunctionKernel, LinearKernel
from jsvgd.diagnostics import CollapseSummary, collapse_summary, ksd, mmd
from jsvgd.direction import svgd_direction, svgd_update
from jsvgd.dispatch import which_implementation
from jsvgd.fit import fit
from jsvgd.fit_result import FitResult
from jsvgd.groups import scale_by_svgd_per_group
from jsvgd.kernels import IMQ, RBF, KernelSum, RadialKernel
from jsvgd.loop import History, run
from jsvgd.preconditioner import Preconditioner
from jsvgd.sampler import SamplingAlgorithm, SVGDInfo, SVGDState, svgd
from jsvgd.stochastic import kernel_noise, stochastic_svgd
from jsvgd.stopping import StopOnKSD, StopOnMovement
from jsvgd.thinning import stein_thinning
from jsvgd.transform import ScaleBySVGDState, scale_by_svgd

__version__ = "0.1.0"

__all__ = [
    "IMQ",
    "RBF",
    "BandwidthRule",
    "BandwidthSchedule",
    "Checkpoint",
    "CollapseSummary",
    "FitResult",
    "FunctionKernel",
    "History",
    "KernelSum",
    "LinearKernel",
    "Preconditioner",
    "RadialKernel",
    "SVGDInfo",
    "SVGDState",
    "SamplingAlgorithm",
    "ScaleBySVGDState",
    "StopOnKSD",
    "StopOnMovement",
    "collapse_summary",
    "fit",
    "kernel_noise",
    "ksd",
    "median_bandwidth",
    "mmd",
    "reference",
    "run",
    "scale_by_svgd",
    "scale_by_svgd_per_group",
    "stein_thinning",
    "stochastic_svgd",
    "svgd",
    "svgd_direction",
    "svgd_update",
    "to_arviz",
    "which_implementation",
]
