"""What the particles together predict: an equal mixture of the likelihoods of n networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jsvgd.flax.likelihoods import Likelihood, categorical_likelihood, gaussian_likelihood
from jsvgd.flax.log_posterior import Position

__all__ = ["Prediction", "class_probabilities", "log_predictive_density", "predict"]


class Prediction(NamedTuple):
    """Moments of the mixture, each (B,) or (B, k), in the units of the targets.

    Attributes:
      mean: the particles' average expected target.
      sd: sqrt(epistemic_sd**2 + aleatoric_sd**2), the standard deviation of the mixture.
      epistemic_sd: spread of the particles' expected targets: what more data would take away.
      aleatoric_sd: root of the particles' average variance: noise in the targets themselves.
    """

    mean: jax.Array
    sd: jax.Array
    epistemic_sd: jax.Array
    aleatoric_sd: jax.Array


def predict(
    apply: Callable[..., jax.Array],
    particles: Position,
    inputs: jax.Array,
    *,
    likelihood: Likelihood | None = None,
    target_mean: jax.Array | float = 0.0,
    target_scale: jax.Array | float = 1.0,
) -> Prediction:
    """Mean and standard deviations of the targets at ``inputs`` under the particle mixture.

    Args:
      apply: (parameters, inputs) -> outputs (B, ...).
      particles: a ``Position`` with a leading particle axis on every leaf.
      inputs: what ``apply`` takes, standardised as in training.
      likelihood: as in training; ``gaussian_likelihood()`` where absent.
      target_mean, target_scale: what the targets of the training were standardised with, that is
        (y - target_mean) / target_scale; scalars, or (k,) for k outputs.

    Returns:
      A ``Prediction`` in the units of the targets before standardisation.
    """
    likelihood = gaussian_likelihood() if likelihood is None else likelihood
    _refuse_units_of_discrete(likelihood, target_mean, target_scale)

    def one(position):
        outputs = apply(position.params, inputs)
        own = position.likelihood
        return likelihood.mean(own, outputs), likelihood.variance(own, outputs)

    means, variances = jax.vmap(one)(particles)
    epistemic = jnp.var(means, axis=0)
    aleatoric = jnp.mean(variances, axis=0)
    return Prediction(
        mean=target_mean + target_scale * jnp.mean(means, axis=0),
        sd=target_scale * jnp.sqrt(epistemic + aleatoric),
        epistemic_sd=target_scale * jnp.sqrt(epistemic),
        aleatoric_sd=target_scale * jnp.sqrt(aleatoric),
    )


def class_probabilities(
    apply: Callable[..., jax.Array],
    particles: Position,
    inputs: jax.Array,
    *,
    likelihood: Likelihood | None = None,
) -> jax.Array:
    """Probabilities of the classes, averaged over the particles.

    Args:
      apply, particles, inputs: as for ``predict``.
      likelihood: ``categorical_likelihood()`` where absent, or ``bernoulli_likelihood()``.

    Returns:
      (B, K), rows that add up to one; for a Bernoulli likelihood (..., 2), classes 0 and 1.
    """
    likelihood = categorical_likelihood() if likelihood is None else likelihood
    if likelihood.kind not in ("class", "binary"):
        raise ValueError(f"likelihood must be one of classes, got one of {likelihood.kind} targets")
    mean = predict(apply, particles, inputs, likelihood=likelihood).mean
    return mean if likelihood.kind == "class" else jnp.stack([1 - mean, mean], axis=-1)


def log_predictive_density(
    apply: Callable[..., jax.Array],
    particles: Position,
    inputs: jax.Array,
    targets: jax.Array,
    *,
    likelihood: Likelihood | None = None,
    target_mean: jax.Array | float = 0.0,
    target_scale: jax.Array | float = 1.0,
) -> jax.Array:
    """log (1/n sum_i p(y_b | x_b, theta_i)), the log of the particle-averaged density.

    Args:
      apply, particles, inputs, likelihood, target_mean, target_scale: as for ``predict``.
      targets: (B,) or (B, k), not standardised.

    Returns:
      (B,), log densities in the units of ``targets``: the standardisation's Jacobian is included.
    """
    likelihood = gaussian_likelihood() if likelihood is None else likelihood
    _refuse_units_of_discrete(likelihood, target_mean, target_scale)
    targets = jnp.asarray(targets)
    standardised = targets
    if likelihood.kind == "continuous":
        standardised = (targets - target_mean) / target_scale

    def one(position):
        return likelihood.log_density(
            position.likelihood, apply(position.params, inputs), standardised
        )

    log_densities = jax.vmap(one)(particles)
    n = log_densities.shape[0]
    mixture = jax.scipy.special.logsumexp(log_densities, axis=0) - math.log(n)
    log_scales = jnp.broadcast_to(jnp.log(jnp.asarray(target_scale)), targets.shape[1:])
    return mixture - jnp.sum(log_scales)


def _refuse_units_of_discrete(likelihood, target_mean, target_scale):
    if likelihood.kind == "continuous":
        return
    for name, value, neutral in [
        ("target_mean", target_mean, 0.0),
        ("target_scale", target_scale, 1.0),
    ]:
        if not (isinstance(value, float | int) and value == neutral):
            raise ValueError(f"{name} must be left out for counts and classes, got {value}")
