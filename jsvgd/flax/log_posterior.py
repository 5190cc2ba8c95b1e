"""Log posteriors of networks: a likelihood, a prior, and their own parameters beside the weights.

A position of the sampler is a ``Position``: the network's parameters, the likelihood's (a noise
precision) and the prior's (a weight precision).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jsvgd.flax.likelihoods import Likelihood, gaussian_likelihood
from jsvgd.flax.priors import Prior, normal_prior

__all__ = ["Position", "init_positions", "log_posterior"]


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
        jax.vmap(prior.init)(jax.random.split(prior_key, n), params),
    )
