"""Likelihoods: the distribution of targets given a network's outputs.

Each is a small record of pure functions, so that a new one is one new constructor. A trailing axis of
length one is dropped from outputs and targets alike (but for classes), so that (B, 1) and (B,) never
broadcast to (B, B); further axes are independent outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jsvgd.flax.densities import (
    at_least_float32,
    check_positive,
    log_gamma_density,
    log_gamma_sample,
)

__all__ = [
    "Likelihood",
    "bernoulli_likelihood",
    "categorical_likelihood",
    "fixed_gaussian_likelihood",
    "gaussian_likelihood",
    "heteroscedastic_likelihood",
    "poisson_likelihood",
]


class Likelihood(NamedTuple):
    """The distribution of targets given the network's outputs, with parameters of its own.

    Attributes:
      init: rng_key -> own parameters, a draw from their prior.
      log_prior: own parameters -> scalar.
      log_density: (own parameters, outputs (B, ...), targets (B, ...)) -> (B,).
      mean: (own parameters, outputs) -> expected targets; for classes their probabilities.
      variance: (own parameters, outputs) -> variance of the targets, in the shape of ``mean``.
      kind: of the targets: "continuous", "count", "binary" or "class". Only continuous ones may be
        shifted and scaled.
    """

    init: Callable[[jax.Array], Any]
    log_prior: Callable[[Any], jax.Array]
    log_density: Callable[[Any, jax.Array, jax.Array], jax.Array]
    mean: Callable[[Any, jax.Array], jax.Array]
    variance: Callable[[Any, jax.Array], jax.Array]
    kind: str = "continuous"


def gaussian_likelihood(shape: float = 1.0, rate: float = 0.1) -> Likelihood:
    """y ~ N(f(x), 1/g), g ~ Gamma(shape, rate): one noise precision g, learned as log g.

    The defaults are those of Liu and Wang (2016, section 5). The density is that of log g, the
    Jacobian included. Further outputs share g.
    """
    check_positive(shape=shape, rate=rate)

    def log_density(log_precision, outputs, targets):
        outputs, targets = _matched(outputs, targets)
        return _summed(_log_normal(targets, outputs, -log_precision))

    def variance(log_precision, outputs):
        return jnp.broadcast_to(jnp.exp(-log_precision), _univariate(outputs).shape)

    return Likelihood(
        init=lambda rng_key: log_gamma_sample(rng_key, shape, rate),
        log_prior=lambda log_precision: log_gamma_density(log_precision, shape, rate),
        log_density=log_density,
        mean=lambda log_precision, outputs: _univariate(outputs),
        variance=variance,
    )


def fixed_gaussian_likelihood(sd: float) -> Likelihood:
    """y ~ N(f(x), sd^2) with a known standard deviation."""
    check_positive(sd=sd)
    log_variance = 2 * math.log(sd)

    def log_density(own, outputs, targets):
        outputs, targets = _matched(outputs, targets)
        return _summed(_log_normal(targets, outputs, log_variance))

    return _without_parameters(
        log_density=log_density,
        mean=_univariate,
        variance=lambda outputs: jnp.full_like(_univariate(outputs), sd**2),
    )


def heteroscedastic_likelihood(min_sd: float = 1e-3) -> Likelihood:
    """y ~ N(f(x), v(x)): the network gives mean and noise.

    The last axis of the outputs has two numbers an output: first all means, then as many raw
    noises r, v = (min_sd + softplus(r))^2. ``min_sd`` keeps the density of a fitted row bounded.
    """
    check_positive(min_sd=min_sd)

    def moments(outputs):
        if outputs.ndim < 2 or outputs.shape[-1] % 2:
            raise ValueError(
                "outputs must have an even last axis, means and raw noises, "
                f"got shape {outputs.shape}"
            )
        means, raw = jnp.split(at_least_float32(outputs), 2, axis=-1)
        return _univariate(means), 2 * jnp.log(min_sd + jax.nn.softplus(_univariate(raw)))

    def log_density(own, outputs, targets):
        means, log_variances = moments(outputs)
        means, targets = _matched(means, targets)
        return _summed(_log_normal(targets, means, log_variances))

    return _without_parameters(
        log_density=log_density,
        mean=lambda outputs: moments(outputs)[0],
        variance=lambda outputs: jnp.exp(moments(outputs)[1]),
    )


def bernoulli_likelihood() -> Likelihood:
    """y in {0, 1}, P(y = 1) = sigmoid(f(x)): the outputs are logits."""

    def log_density(own, outputs, targets):
        logits, targets = _matched(outputs, targets)
        return _summed(targets * logits - jax.nn.softplus(logits))

    def variance(outputs):
        probability = jax.nn.sigmoid(_univariate(outputs))
        return probability * (1 - probability)

    return _without_parameters(
        log_density=log_density,
        mean=lambda outputs: jax.nn.sigmoid(_univariate(outputs)),
        variance=variance,
        kind="binary",
    )


def categorical_likelihood() -> Likelihood:
    """y in {0, ..., K - 1}, whole numbers, with probabilities softmax(f(x)): outputs (B, K).

    A class out of range is an error where its value is known, and has the density NaN in compiled code.
    """

    def log_density(own, outputs, targets):
        given, targets = targets, jnp.asarray(targets)
        if targets.shape != outputs.shape[:-1] or not jnp.issubdtype(targets.dtype, jnp.integer):
            raise ValueError(
                f"targets must be whole numbers of shape {outputs.shape[:-1]}, the classes, "
                f"got {targets.dtype} of shape {targets.shape}"
            )
        num_classes = outputs.shape[-1]
        if not isinstance(given, jax.core.Tracer):
            _check_classes(np.asarray(given), num_classes)
        log_probabilities = jax.nn.log_softmax(at_least_float32(outputs))
        picked = jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]
        # Indexing would count negative ones from the end.
        known = (targets >= 0) & (targets < num_classes)
        return _summed(jnp.where(known, picked, jnp.nan))

    def probabilities(outputs):
        return jax.nn.softmax(at_least_float32(outputs))

    return _without_parameters(
        log_density=log_density,
        mean=probabilities,
        variance=lambda outputs: probabilities(outputs) * (1 - probabilities(outputs)),
        kind="class",
    )


def _check_classes(targets: np.ndarray, num_classes: int) -> None:
    unknown = targets[(targets < 0) | (targets >= num_classes)]
    if unknown.size:
        raise ValueError(
            f"targets must be classes from 0 to {num_classes - 1}, as many as outputs has columns, "
            f"got {unknown[0]}"
        )


def poisson_likelihood() -> Likelihood:
    """y ~ Poisson(exp(f(x))): the outputs are log rates."""

    def log_density(own, outputs, targets):
        log_rates, targets = _matched(outputs, targets)
        constant = jax.scipy.special.gammaln(targets + 1)
        return _summed(targets * log_rates - jnp.exp(log_rates) - constant)

    def rate(outputs):
        return jnp.exp(_univariate(outputs))

    return _without_parameters(log_density=log_density, mean=rate, variance=rate, kind="count")


def _without_parameters(*, log_density, mean, variance, kind="continuous") -> Likelihood:
    return Likelihood(
        init=lambda rng_key: (),
        log_prior=lambda own: jnp.zeros(()),
        log_density=log_density,
        mean=lambda own, outputs: mean(outputs),
        variance=lambda own, outputs: variance(outputs),
        kind=kind,
    )


def _log_normal(targets, means, log_variance):
    squared = jnp.square(targets - means)
    return -0.5 * (log_variance + math.log(2 * math.pi) + jnp.exp(-log_variance) * squared)


def _summed(terms):
    """(B,): the sum over all axes but the first."""
    return jnp.sum(terms, axis=tuple(range(1, terms.ndim)))


def _univariate(array):
    """At least float32, without a trailing axis of length one."""
    array = at_least_float32(jnp.asarray(array))
    return array[..., 0] if array.ndim > 1 and array.shape[-1] == 1 else array


def _matched(outputs, targets):
    targets = jnp.asarray(targets)
    if not jnp.issubdtype(targets.dtype, jnp.floating):
        targets = targets.astype(outputs.dtype)
    outputs, targets = _univariate(outputs), _univariate(targets)
    if outputs.shape != targets.shape:
        raise ValueError(
            f"targets must have the shape of the network's outputs, {outputs.shape}, "
            f"got {targets.shape}"
        )
    return outputs, targets
