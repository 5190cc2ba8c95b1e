"""Bandwidths of particles: the exact median by any rule, and every other form a user may give.

A bandwidth h is a squared length: the kernel is exp(-|x - y|^2 / (2 h)).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jsvgd import compiled_statistic
from jsvgd.arguments import check_matrix
from jsvgd.bandwidth_rule import RULES, BandwidthRule, get_rule
from jsvgd.order_statistic import order_statistics

__all__ = [
    "RULES",
    "BandwidthRule",
    "BandwidthSchedule",
    "check_bandwidth_choice",
    "get_rule",
    "median_bandwidth",
    "resolve_bandwidth",
]

IMPLEMENTATIONS = (None, "triton", "xla", "dense", "interpret")


def median_bandwidth(
    particles: jax.Array,
    *,
    rule: str | BandwidthRule = "median",
    stop_gradient: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """The bandwidth h of a rule: by default max(median |x - y|^2, 1e-5) / max(log N, 1).

    The median is exact: one of the computed distances, to the bit, in every call and under vmap. A
    squared distance is computed to about 1e-6, at worst 1e-4; distances below 1e-16 of the largest
    coordinate count as 0. No N x N array is formed: memory grows with N d, and a constant.

    Args:
      particles: (N, d). bfloat16 and float16 are computed in float32.
      rule: "median" (the lower median of all N^2 squared distances, diagonal zeros counted),
        the rule of another library, "liu", "numpyro", "blackjax", "msvgd", "pyro", "no_log",
        "median_distance" (no logarithm, for tests of goodness of fit), or a ``BandwidthRule``.
      stop_gradient: True makes h a constant for differentiation. Otherwise its gradient is that
        of the selected pair's distance, the mean over pairs that tie; zero below the floor.
      implementation: None ("triton" where it can, else "xla") | "triton" (Pallas kernels for NVIDIA
        GPUs, Ampere or newer: float32, d <= 512) | "xla" (any platform) | "dense" (sorts all N^2
        distances: small inputs and tests only) | "interpret" (the Pallas kernels under the Pallas
        interpreter: any machine, for tests). The last digits of h depend on it.

    Returns:
      h, a scalar, or (d,) for rules with one bandwidth a dimension ("pyro"). float32, or float64
      for float64 particles. NaN where a particle is not finite. Zero where a rule without a
      floor meets particles that coincide, as in the library that it comes from.

    Raises:
      ValueError: for another shape, an unknown rule or implementation, or one that does not take
        these particles.
      TypeError: for particles that are not floating-point.

    Example:
      >>> import jax.numpy as jnp
      >>> float(median_bandwidth(jnp.array([[0.0], [1.0], [3.0]])))  # 1 / log 3
      0.9102392...
    """
    rule = get_rule(rule)
    particles = check_matrix("particles", particles)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
    if particles.dtype.itemsize < 4:
        particles = particles.astype(jnp.float32)
    if stop_gradient:
        particles = jax.lax.stop_gradient(particles)
    if rule.per_dimension:
        columns = particles.T[:, :, None]
        implementation = _implementation(particles.shape[0], 1, particles.dtype, implementation)
        each = jax.vmap if implementation == "triton" else _one_by_one
        return each(lambda x: _bandwidth(x, rule, implementation))(columns)
    implementation = _implementation(*particles.shape, particles.dtype, implementation)
    return _bandwidth(particles, rule, implementation)


def _one_by_one(function):
    return lambda x: jax.lax.map(function, x)


def _implementation(n, d, dtype, implementation: str | None) -> str:
    """The implementation that was asked for, checked, or the best."""
    if implementation is None:
        platform = jax.default_backend()
        return compiled_statistic.choose(n, d, dtype=dtype, platform=platform).implementation
    if implementation in ("triton", "interpret") and n > 1:
        takes, why_not = compiled_statistic.supports(n, d, dtype)
        if not takes:
            raise ValueError(f"implementation={implementation!r} does not take this: {why_not}")
    return implementation


@functools.partial(
    jax.jit, static_argnums=(1, 2)
)  # so that a call outside of jit gives the same bits
def _bandwidth(x: jax.Array, rule: BandwidthRule, implementation: str) -> jax.Array:
    n = x.shape[0]
    if n == 1 and (rule.single_particle is not None or not rule.diagonal):
        b = 1.0 if rule.single_particle is None else rule.single_particle
        # Not finite in, not finite out; and no dependence on the particle otherwise.
        bad = jnp.sum(jax.lax.stop_gradient(x)) * 0
        return b / 2 + bad
    if rule.sample is not None and n > 1:
        elements, fraction = _sampled_elements(x, rule)
    else:
        elements, fraction = _exact_elements(x, rule, implementation)
    elements = _at_least(elements, rule.distance_floor)
    if not rule.squared:
        elements = _distance(elements)
    middle = _between(elements, fraction)
    if not rule.squared:
        middle = middle**2
    log = 1.0
    if rule.log is not None:
        log = max(math.log(n + (rule.log == "n+1")), rule.log_floor)
    b = rule.multiplier * _at_least(middle, rule.floor) / log
    if rule.add_epsilon:
        b = b + jnp.finfo(b.dtype).eps
    return b / 2


def _places(count: int, rule: BandwidthRule) -> tuple[list[int], float]:
    """0-based places of the one or two elements a quantile of `count` sorted ones lies between."""
    if rule.quantile == 0.5:
        lower, fraction = (count - 1) // 2, 0.5 if count % 2 == 0 else 0.0
    else:
        lower, fraction = divmod(rule.quantile * (count - 1), 1)
    lower = int(lower)
    if rule.interpolation == "lower" or fraction == 0:
        return [lower], 0.0
    return [lower, lower + 1], fraction


def _between(elements: jax.Array, fraction: float) -> jax.Array:
    if elements.shape[0] == 1:
        return elements[0]
    return elements[0] * (1 - fraction) + elements[1] * fraction


def _exact_elements(x, rule, implementation) -> tuple[jax.Array, float]:
    """The one or two squared distances that the quantile lies between."""
    n = x.shape[0]
    pairs = n * (n - 1) // 2
    places, fraction = _places(n * n if rule.diagonal else pairs, rule)
    # Among the sorted entries of the full matrix N zeros come first, then every pair twice.
    ranks = [(place - n) // 2 + 1 if rule.diagonal else place + 1 for place in places]
    positive = tuple(sorted({rank for rank in ranks if rank > 0}))
    if not positive:
        finite = jnp.all(jnp.isfinite(jax.lax.stop_gradient(x)))
        zero = jnp.where(finite, 0, jnp.nan).astype(x.dtype)
        return jnp.stack([zero] * len(ranks)), fraction
    if implementation == "dense":
        found = _dense_order_statistics(x, positive)
    elif implementation in ("triton", "interpret"):
        interpret = implementation == "interpret"
        found = compiled_statistic.order_statistics(x, positive, interpret=interpret)
    else:
        found = order_statistics(x, positive)
    zero = found[0] * 0  # NaN where the particles are
    return (
        jnp.stack([found[positive.index(rank)] if rank > 0 else zero for rank in ranks]),
        fraction,
    )


def _dense_order_statistics(x, ranks) -> jax.Array:
    i, j = np.triu_indices(x.shape[0], 1)
    distances = jnp.sort(jnp.sum((x[i] - x[j]) ** 2, axis=1))
    values = distances[np.array(ranks) - 1]
    return jnp.where(jnp.all(jnp.isfinite(x)), values, jnp.nan)


def _sampled_elements(x, rule) -> tuple[jax.Array, float]:
    n = x.shape[0]
    generator = np.random.default_rng(0)
    i = generator.integers(0, n, rule.sample)
    if rule.diagonal:
        j = generator.integers(0, n, rule.sample)
    else:
        j = (i + generator.integers(1, n, rule.sample)) % n
    distances = jnp.sort(jnp.sum((x[i] - x[j]) ** 2, axis=1))
    finite = jnp.all(jnp.isfinite(jax.lax.stop_gradient(x)))
    distances = jnp.where(finite, distances, jnp.nan)
    places, fraction = _places(rule.sample, rule)
    return distances[np.array(places)], fraction


def _at_least(value: jax.Array, floor: float) -> jax.Array:
    """max(value, floor) with the gradient of the larger one, zero where they are equal."""
    return jnp.where(value <= floor, jnp.asarray(floor, value.dtype), value)


def _distance(squared: jax.Array) -> jax.Array:
    """sqrt with gradient 0 at 0: particles that coincide have no direction to part in."""
    positive = squared != 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squared, 1)), 0)


@dataclasses.dataclass(frozen=True)
class BandwidthSchedule:
    """A bandwidth that depends on the step: ``schedule(step)`` times the bandwidth of ``rule``.

    Attributes:
      schedule: an optax schedule, from an int32 step (0 at the first) to a positive scalar.
      rule: anything that ``resolve_bandwidth`` takes; with None, ``schedule(step)`` itself is h.

    Example:
      >>> import optax
      >>> wide_at_first = BandwidthSchedule(optax.exponential_decay(10.0, 100, 0.5, end_value=1.0))
      >>> absolute = BandwidthSchedule(optax.linear_schedule(2.0, 0.1, 500), rule=None)
    """

    schedule: Callable
    rule: object = "median"

    def __post_init__(self):
        if not callable(self.schedule):
            raise TypeError(
                "schedule must be a function from the step to a positive number, "
                f"got {type(self.schedule).__name__}"
            )
        if self.rule is not None:
            check_bandwidth_choice(self.rule)


def check_bandwidth_choice(bandwidth) -> None:
    """Raises where ``resolve_bandwidth`` could not use this, before any particle is there.

    Raises:
      ValueError: for an unknown name and for numbers that are not positive.
      TypeError: for anything that is no rule, number, schedule or function.
    """
    if isinstance(bandwidth, (BandwidthRule, BandwidthSchedule)):
        return
    if isinstance(bandwidth, str):
        get_rule(bandwidth)
    elif isinstance(bandwidth, bool) or not (
        callable(bandwidth) or isinstance(bandwidth, (numbers.Real, jax.Array, np.ndarray))
    ):
        raise TypeError(
            "bandwidth must be the name of a rule, a BandwidthRule, a number, an array (d,), "
            "a BandwidthSchedule or a function of the particles, "
            f"got {type(bandwidth).__name__}"
        )
    elif not callable(bandwidth) and not isinstance(bandwidth, jax.core.Tracer):
        values = np.asarray(bandwidth, np.float64)
        if not (values > 0).all() or not np.isfinite(values).all():
            raise ValueError(f"bandwidth must be positive and finite, got {bandwidth}")


def resolve_bandwidth(bandwidth, particles: jax.Array, step: jax.Array | int = 0) -> jax.Array:
    """The bandwidth h of these particles at this step, from any of the forms a user may give.

    | given | h |
    |---|---|
    | a name or a ``BandwidthRule`` | ``median_bandwidth(particles, rule=...)`` |
    | a number, or an array of shape () or (d,) | itself |
    | ``BandwidthSchedule(schedule, rule)`` | ``schedule(step)`` times the rule's |
    | a function | ``function(particles)``, a scalar or (d,) |

    A bare function always takes the particles; a schedule over steps comes in a
    ``BandwidthSchedule``, since nothing tells the two apart.

    Args:
      bandwidth: as above.
      particles: (N, d).
      step: int32, 0 at the first step; read by schedules only.

    Returns:
      A scalar or (d,), in the dtype of the particles or float32, whichever is wider.
    """
    check_bandwidth_choice(bandwidth)
    if isinstance(bandwidth, (str, BandwidthRule)):
        return median_bandwidth(particles, rule=bandwidth)
    particles = check_matrix("particles", particles)
    dtype = jnp.promote_types(particles.dtype, jnp.float32)
    if isinstance(bandwidth, BandwidthSchedule):
        factor = jnp.asarray(bandwidth.schedule(step), dtype)
        if bandwidth.rule is None:
            return _check_shape(factor, particles.shape[1])
        return factor * resolve_bandwidth(bandwidth.rule, particles, step)
    if callable(bandwidth):
        bandwidth = bandwidth(particles)
    return _check_shape(jnp.asarray(bandwidth, dtype), particles.shape[1])


def _check_shape(h: jax.Array, dimension: int) -> jax.Array:
    if h.shape not in ((), (dimension,)):
        raise ValueError(f"bandwidth must be a scalar or have shape ({dimension},), got {h.shape}")
    return h
