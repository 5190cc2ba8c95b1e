"""Log posteriors of networks: a likelihood, a prior, and their own parameters beside the weights.

A position of the sampler is a ``Position``: the network's parameters, the likelihood's (a noise
precision) and the prior's (a weight precision). Likelihoods and priors are small records of pure
functions, so that a new one is one new constructor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = [
    "Likelihood",
    "Position",
    "Prior",
    "gaussian_likelihood",
    "init_positions",
    "log_posterior",
    "normal_prior",
]


class Position(NamedTuple):
    """Where one particle is (or all of them, with a leading axis on every leaf).

    Attributes:
      params: the network's parameters, a pytree.
      likelihood: the likelihood's own parameters; ``()`` where it has none.
      prior: the prior's own parameters; ``()`` where it has none.
    """

    params: Any
    likelihood: Any
    prior: Any


class Likelihood(NamedTuple):
    """The distribution of targets given the network's outputs, with parameters of its own.

    Attributes:
      init: rng_key -> own parameters, a draw from their prior.
      log_prior: own parameters -> scalar.
      log_density: (own parameters, outputs (B, ...), targets (B, ...)) -> (B,).
      mean: (own parameters, outputs) -> expected targets.
      variance: (own parameters, outputs) -> variance of the targets, in the shape of ``mean``.
    """

    init: Callable[[jax.Array], Any]
    log_prior: Callable[[Any], jax.Array]
    log_density: Callable[[Any, jax.Array, jax.Array], jax.Array]
    mean: Callable[[Any, jax.Array], jax.Array]
    variance: Callable[[Any, jax.Array], jax.Array]


class Prior(NamedTuple):
    """The distribution of the network's parameters, with parameters of its own.

    Attributes:
      init: rng_key -> own parameters, a draw from their prior.
      log_density: (own parameters, network parameters) -> scalar, the prior of the own parameters
        included.
    """

    init: Callable[[jax.Array], Any]
    log_density: Callable[[Any, Any], jax.Array]


def gaussian_likelihood(shape: float = 1.0, rate: float = 0.1) -> Likelihood:
    """y ~ N(f(x), 1/g), g ~ Gamma(shape, rate): one noise precision g, learned as log g.

    The defaults are those of Liu and Wang (2016, section 5). The density is that of log g, the
    Jacobian included. A trailing axis of length one is dropped from outputs and targets alike, so
    that (B, 1) and (B,) never broadcast to (B, B). Further axes are independent outputs that share g.
    """
    _check_positive(shape=shape, rate=rate)

    def log_density(log_precision, outputs, targets):
        outputs, targets = _univariate(outputs), _univariate(targets)
        if outputs.shape != targets.shape:
            raise ValueError(
                f"targets must have the shape of the network's outputs, {outputs.shape}, "
                f"got {targets.shape}"
            )
        squared = jnp.square(targets - outputs)
        terms = 0.5 * (log_precision - math.log(2 * math.pi) - jnp.exp(log_precision) * squared)
        return jnp.sum(terms, axis=tuple(range(1, terms.ndim)))

    def variance(log_precision, outputs):
        return jnp.broadcast_to(jnp.exp(-log_precision), _univariate(outputs).shape)

    return Likelihood(
        init=lambda rng_key: _log_gamma_sample(rng_key, shape, rate),
        log_prior=lambda log_precision: _log_gamma_density(log_precision, shape, rate),
        log_density=log_density,
        mean=lambda log_precision, outputs: _univariate(outputs),
        variance=variance,
    )


def normal_prior(shape: float = 1.0, rate: float = 0.1) -> Prior:
    """w ~ N(0, 1/l) for every weight and bias, l ~ Gamma(shape, rate): one precision l, as log l.

    The defaults are those of Liu and Wang (2016, section 5). The density is that of log l, the
    Jacobian included.
    """
    _check_positive(shape=shape, rate=rate)

    def log_density(log_precision, params):
        leaves = [_at_least_float32(leaf) for leaf in jax.tree.leaves(params)]
        size = sum(leaf.size for leaf in leaves)
        squared = sum(jnp.sum(jnp.square(leaf)) for leaf in leaves)
        log_normal = 0.5 * (
            size * (log_precision - math.log(2 * math.pi)) - jnp.exp(log_precision) * squared
        )
        return log_normal + _log_gamma_density(log_precision, shape, rate)

    return Prior(
        init=lambda rng_key: _log_gamma_sample(rng_key, shape, rate), log_density=log_density
    )


def log_posterior(
    apply: Callable[..., jax.Array],
    *,
    data_size: int,
    likelihood: Likelihood | None = None,
    prior: Prior | None = None,
) -> Callable[[Position, tuple], jax.Array]:
    """The log posterior density of one position, from a minibatch.

    log p(theta) + data_size / B * sum_b log p(y_b | x_b, theta): unbiased for the whole data.

    Args:
      apply: (parameters, inputs) -> outputs (B, ...), as ``functional`` makes it.
      data_size: rows of the whole training set, of which a batch is a sample. With the whole data as
        the batch the factor is 1.
      likelihood: ``gaussian_likelihood()`` where absent.
      prior: ``normal_prior()`` where absent.

    Returns:
      ``logdensity_fn(position, (inputs, targets)) -> scalar`` for ``jsvgd.svgd``.

    Raises:
      ValueError: for data_size < 1; when called, for an empty batch, for inputs and targets of
        different lengths and for targets that do not match the outputs.
    """
    data_size = operator.index(data_size)
    if data_size < 1:
        raise ValueError(f"data_size must be at least 1, got {data_size}")
    likelihood = gaussian_likelihood() if likelihood is None else likelihood
    prior = normal_prior() if prior is None else prior

    def logdensity_fn(position: Position, batch: tuple) -> jax.Array:
        inputs, targets = batch
        outputs = apply(position.params, inputs)
        terms = likelihood.log_density(position.likelihood, outputs, targets)
        (rows,) = terms.shape
        if rows == 0:
            raise ValueError("batch must hold at least one row, got none")
        return (
            data_size / rows * jnp.sum(terms)
            + likelihood.log_prior(position.likelihood)
            + prior.log_density(position.prior, position.params)
        )

    return logdensity_fn


def init_positions(
    rng_key: jax.Array,
    params: Any,
    *,
    likelihood: Likelihood | None = None,
    prior: Prior | None = None,
) -> Position:
    """Positions for parameter particles, the likelihood's and prior's own parameters drawn.

    Args:
      rng_key: a key of ``jax.random``.
      params: (n, ...) on every leaf, as ``init_particles`` makes them.
      likelihood, prior: as for ``log_posterior``.

    Returns:
      A ``Position`` with a leading axis n on every leaf.
    """
    leaves = jax.tree.leaves(params)
    if not leaves or len({jnp.shape(leaf)[:1] for leaf in leaves}) != 1 or jnp.ndim(leaves[0]) == 0:
        raise ValueError(
            "params must have one leading particle axis on every leaf, got leaves of shapes "
            f"{[jnp.shape(leaf) for leaf in leaves]}"
        )
    likelihood = gaussian_likelihood() if likelihood is None else likelihood
    prior = normal_prior() if prior is None else prior
    likelihood_key, prior_key = jax.random.split(rng_key)
    n = leaves[0].shape[0]
    return Position(
        params,
        jax.vmap(likelihood.init)(jax.random.split(likelihood_key, n)),
        jax.vmap(prior.init)(jax.random.split(prior_key, n)),
    )


def _log_gamma_density(log_value, shape, rate):
    """Log density of log v for v ~ Gamma(shape, rate); the Jacobian adds log v."""
    constant = shape * math.log(rate) - math.lgamma(shape)
    return shape * log_value - rate * jnp.exp(log_value) + constant


def _log_gamma_sample(rng_key, shape, rate):
    return jax.random.loggamma(rng_key, shape) - math.log(rate)


def _at_least_float32(array):
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _univariate(array):
    """At least float32, without a trailing axis of length one."""
    array = _at_least_float32(jnp.asarray(array))
    return array[..., 0] if array.ndim > 1 and array.shape[-1] == 1 else array


def _check_positive(**values):
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
