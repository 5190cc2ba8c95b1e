"""Priors of a network's parameters, with parameters of their own where the scale is learned."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jsvgd.flax.densities import (
    at_least_float32,
    check_positive,
    log_gamma_density,
    log_gamma_sample,
)
from jsvgd.groups import split_groups

__all__ = [
    "Prior",
    "fixed_normal_prior",
    "horseshoe_prior",
    "laplace_prior",
    "normal_prior",
    "per_layer_prior",
]


class Prior(NamedTuple):
    """The distribution of the network's parameters, with parameters of its own.

    Attributes:
      init: (rng_key, network parameters) -> own parameters, a draw from their prior. Of the network's
        parameters only structure and shapes count.
      log_density: (own parameters, network parameters) -> scalar, the prior of the own parameters
        included.
    """

    init: Callable[[jax.Array, Any], Any]
    log_density: Callable[[Any, Any], jax.Array]


def normal_prior(shape: float = 1.0, rate: float = 0.1) -> Prior:
    """w ~ N(0, 1/l) for every weight and bias, l ~ Gamma(shape, rate): one precision l, as log l.

    The defaults are those of Liu and Wang (2016, section 5). The density is that of log l, the
    Jacobian included.
    """
    check_positive(shape=shape, rate=rate)

    def log_density(log_precision, params):
        leaves = _leaves(params)
        size = sum(leaf.size for leaf in leaves)
        squared = sum(jnp.sum(jnp.square(leaf)) for leaf in leaves)
        log_normal = 0.5 * (
            size * (log_precision - math.log(2 * math.pi)) - jnp.exp(log_precision) * squared
        )
        return log_normal + log_gamma_density(log_precision, shape, rate)

    return Prior(
        init=lambda rng_key, params: log_gamma_sample(rng_key, shape, rate),
        log_density=log_density,
    )


def fixed_normal_prior(sd: float = 1.0) -> Prior:
    """w ~ N(0, sd^2) for every weight and bias: weight decay of 1 / sd^2."""
    check_positive(sd=sd)
    constant = -math.log(sd) - 0.5 * math.log(2 * math.pi)

    def log_density(own, params):
        return sum(jnp.sum(constant - 0.5 * jnp.square(leaf / sd)) for leaf in _leaves(params))

    return Prior(init=lambda rng_key, params: (), log_density=log_density)


def laplace_prior(scale: float = 1.0) -> Prior:
    """w ~ Laplace(0, scale) for every weight and bias; the standard deviation is scale sqrt(2)."""
    check_positive(scale=scale)
    constant = -math.log(2 * scale)

    def log_density(own, params):
        return sum(jnp.sum(constant - jnp.abs(leaf) / scale) for leaf in _leaves(params))

    return Prior(init=lambda rng_key, params: (), log_density=log_density)


def horseshoe_prior(scale: float = 1.0) -> Prior:
    """w_k ~ N(0, (t l_k)^2), l_k ~ C+(0, 1), t ~ C+(0, scale) (Carvalho, Polson and Scott, 2010).

    Most weights are close to zero and a few are free. The own parameters are log t and a log l_k for
    every weight, which doubles the dimensions; their Jacobians are included.
    """
    check_positive(scale=scale)

    def init(rng_key, params):
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(rng_key, len(leaves) + 1)
        locals_ = [
            _log_half_cauchy_sample(key, leaf.shape, at_least_float32(leaf).dtype)
            for key, leaf in zip(keys[1:], leaves, strict=True)
        ]
        dtype = jnp.result_type(*locals_)
        log_global = math.log(scale) + _log_half_cauchy_sample(keys[0], (), dtype)
        return {"log_global": log_global, "log_local": jax.tree.unflatten(structure, locals_)}

    def log_density(own, params):
        log_global = own["log_global"]
        total = _log_half_cauchy(log_global - math.log(scale))
        for w, log_local in zip(_leaves(params), jax.tree.leaves(own["log_local"]), strict=True):
            log_sd = log_global + log_local
            normal = -log_sd - 0.5 * math.log(2 * math.pi) - 0.5 * (w * jnp.exp(-log_sd)) ** 2
            total = total + jnp.sum(normal + _log_half_cauchy(log_local))
        return total

    return Prior(init, log_density)


def per_layer_prior(
    prior: Prior | Callable[[str], Prior],
    groups: str | Callable[[tuple[str, ...]], str] = "layer",
) -> Prior:
    """A prior with parameters of its own for each layer: per-layer scales, learned or given.

    Args:
      prior: for every group alike, ``normal_prior()`` say, which then learns a precision a layer; or
        a function from the label of a group to its prior.
      groups: "layer", "leaf" or a function from a leaf's path to a label, as in
        ``jsvgd.scale_by_svgd_per_group``.

    Returns:
      A ``Prior`` whose own parameters are a dict by label.
    """
    prior_of = (lambda label: prior) if isinstance(prior, Prior) else prior
    if not callable(prior_of):
        raise TypeError(
            f"prior must be a Prior or a function of a label, got {type(prior).__name__}"
        )

    def init(rng_key, params):
        parts = split_groups(params, groups)
        keys = jax.random.split(rng_key, len(parts))
        return {
            label: prior_of(label).init(key, part)
            for key, (label, part) in zip(keys, parts.items(), strict=True)
        }

    def log_density(own, params):
        parts = split_groups(params, groups)
        return sum(prior_of(label).log_density(own[label], part) for label, part in parts.items())

    return Prior(init, log_density)


def _leaves(params):
    return [at_least_float32(jnp.asarray(leaf)) for leaf in jax.tree.leaves(params)]


def _log_half_cauchy(log_value):
    """Log density of log v for v ~ C+(0, 1): 2 v / (pi (1 + v^2))."""
    return math.log(2 / math.pi) + log_value - jax.nn.softplus(2 * log_value)


def _log_half_cauchy_sample(rng_key, shape, dtype):
    uniform = jax.random.uniform(rng_key, shape, dtype, minval=1e-6, maxval=1 - 1e-6)
    return jnp.log(jnp.tan(0.5 * jnp.pi * uniform))
