"""Rules that make a bandwidth of a median: the default, those of other libraries, and your own.

The kernel of a rule is exp(-|x - y|^2 / b), as most libraries write it, so a rule speaks of b and
stays close to their code; the bandwidth h of exp(-|x - y|^2 / (2 h)) is b / 2.
"""

from __future__ import annotations

import dataclasses
import math
import numbers

__all__ = ["RULES", "BandwidthRule", "get_rule"]


@dataclasses.dataclass(frozen=True)
class BandwidthRule:
    """b = multiplier * max(middle of D, floor) / max(log, log_floor), D the squared distances.

    The default is the median of all N^2 entries of the distance matrix, the N zeros of its
    diagonal included, with the lower of two middle elements and no logarithm.

    Attributes:
      squared: True takes the middle of the squared distances; False the middle of the distances,
        squared afterwards. It matters where two middle elements are averaged.
      diagonal: True counts all N^2 entries, zeros of the diagonal included; False the pairs i < j.
      quantile: 0.5 is the median.
      interpolation: where the quantile falls between two elements: "lower" or "linear"
        (at 0.5: the mean of the two).
      log: "n", "n+1" or None: the logarithm that b is divided by.
      log_floor: the logarithm is at least so much.
      distance_floor: every squared distance counts as at least so much.
      floor: the squared median counts as at least so much.
      multiplier: factor of b.
      add_epsilon: add the machine epsilon of the dtype to b.
      single_particle: b for N = 1, where the formula may have no value; None: the formula.
      per_dimension: D_c = (x_c - y_c)^2 and one b for each coordinate c.
      sample: None takes every pair. A number takes so many random pairs, the same ones at every
        call: an estimate, for a cost that does not grow with N^2.
    """

    squared: bool = True
    diagonal: bool = True
    quantile: float = 0.5
    interpolation: str = "lower"
    log: str | None = None
    log_floor: float = 0.0
    distance_floor: float = 0.0
    floor: float = 0.0
    multiplier: float = 1.0
    add_epsilon: bool = False
    single_particle: float | None = 1.0
    per_dimension: bool = False
    sample: int | None = None

    def __post_init__(self):
        if self.log not in ("n", "n+1", None):
            raise ValueError(f'log must be "n", "n+1" or None, got {self.log!r}')
        if self.interpolation not in ("lower", "linear"):
            raise ValueError(
                f'interpolation must be "lower" or "linear", got {self.interpolation!r}'
            )
        if not 0 <= self.quantile <= 1:
            raise ValueError(f"quantile must be between 0 and 1, got {self.quantile}")
        if not (math.isfinite(self.multiplier) and self.multiplier > 0):
            raise ValueError(f"multiplier must be positive, got {self.multiplier}")
        for name in ("log_floor", "distance_floor", "floor"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.single_particle is not None and not self.single_particle > 0:
            raise ValueError(
                f"single_particle must be positive or None, got {self.single_particle}"
            )
        if self.sample is not None and not (_is_integer(self.sample) and self.sample >= 1):
            raise ValueError(f"sample must be a whole number >= 1 or None, got {self.sample!r}")


RULES: dict[str, BandwidthRule] = {
    # The reference: torch.median of the full matrix, clamped, over max(log n, 1); b = 2 h.
    "median": BandwidthRule(
        multiplier=2.0, floor=1e-5, log="n", log_floor=1.0, single_particle=None
    ),
    # Liu and Wang's svgd.py: h^2 = 0.5 median(D) / log(n + 1) in exp(-D / (2 h^2)). PyMC too.
    "liu": BandwidthRule(interpolation="linear", log="n+1"),
    # numpyro.contrib.einstein.stein_util.median_bandwidth with the factor of RBFKernel.
    "numpyro": BandwidthRule(
        squared=False, interpolation="linear", log="n", add_epsilon=True, single_particle=1.0
    ),
    # blackjax.vi.svgd.median_heuristic.
    "blackjax": BandwidthRule(squared=False, diagonal=False, interpolation="linear", log="n"),
    # msvgd: quantile 0.5 of the distances, each at least 1e-6.
    "msvgd": BandwidthRule(diagonal=False, interpolation="linear", log="n", distance_floor=1e-6),
    # pyro.infer.svgd.RBFSteinKernel.
    "pyro": BandwidthRule(diagonal=False, log="n+1", per_dimension=True),
    # The code of matrix-valued SVGD (Wang et al., 2019).
    "no_log": BandwidthRule(interpolation="linear", floor=1e-6, single_particle=None),
    # The median heuristic of kernel tests: the length scale sqrt(h) is the median distance.
    "median_distance": BandwidthRule(
        squared=False, diagonal=False, interpolation="linear", multiplier=2.0
    ),
}


def get_rule(rule: str | BandwidthRule) -> BandwidthRule:
    """The rule of that name, or the rule itself.

    Raises:
      ValueError: for an unknown name.
      TypeError: for anything that is neither a name nor a ``BandwidthRule``.
    """
    if isinstance(rule, BandwidthRule):
        return rule
    if not isinstance(rule, str):
        raise TypeError(
            f"rule must be one of {sorted(RULES)} or a BandwidthRule, got {type(rule).__name__}"
        )
    if rule not in RULES:
        raise ValueError(f"rule must be one of {sorted(RULES)} or a BandwidthRule, got {rule!r}")
    return RULES[rule]


def _is_integer(value) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
