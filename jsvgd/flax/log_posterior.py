"""Log posteriors of networks: a likelihood, a prior, and their own parameters beside the weights.

A position of the sampler is a ``Position``: the network's parameters, the likelihood's (a noise
precision) and the prior's (a weight precision).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jsvgd.arguments import at_least
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
      TypeError: where ``apply`` is no function, ``data_size`` no whole number, ``likelihood`` no
        ``Likelihood``, ``prior`` no ``Prior``; when called, for what is no ``Position``.
      ValueError: for data_size < 1; when called, for an empty batch or one of more rows than
        data_size, for inputs and targets of different lengths, for targets that do not match the
        outputs, and for a position of another likelihood or prior.
    """
    if not callable(apply):
        raise TypeError(
            "apply must be a function (parameters, inputs) -> outputs, as jsvgd.flax.functional "
            f"makes it, got {type(apply).__name__}"
        )
    data_size = at_least("data_size", data_size, 1)
    likelihood, prior = _or_defaults(likelihood, prior)

    def logdensity_fn(position: Position, batch: tuple) -> jax.Array:
        _check_position(position, likelihood, prior)
        inputs, targets = batch
        outputs = apply(position.params, inputs)
        terms = likelihood.log_density(position.likelihood, outputs, targets)
        (rows,) = terms.shape
        if rows == 0:
            raise ValueError("batch must hold at least one row, got none")
        if rows > data_size:
            raise ValueError(
                f"data_size must be the rows of the whole training set, got {data_size} and a batch "
                f"of {rows}"
            )
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
    likelihood, prior = _or_defaults(likelihood, prior)
    likelihood_key, prior_key = jax.random.split(rng_key)
    n = leaves[0].shape[0]
    return Position(
        params,
        jax.vmap(likelihood.init)(jax.random.split(likelihood_key, n)),
        jax.vmap(prior.init)(jax.random.split(prior_key, n), params),
    )


def _or_defaults(likelihood: Any, prior: Any) -> tuple[Likelihood, Prior]:
    likelihood = gaussian_likelihood() if likelihood is None else likelihood
    prior = normal_prior() if prior is None else prior
    for name, value, kind in [("likelihood", likelihood, Likelihood), ("prior", prior, Prior)]:
        if not isinstance(value, kind):
            raise TypeError(
                f"{name} must be a jsvgd.flax.{kind.__name__}, such as that of "
                f"jsvgd.flax.{'gaussian_likelihood' if kind is Likelihood else 'normal_prior'}(), "
                f"got {value!r}"
            )
    return likelihood, prior


def _check_position(position: Any, likelihood: Likelihood, prior: Prior) -> None:
    """Raises where the position holds parameters of another likelihood or prior."""
    if not isinstance(position, Position):
        raise TypeError(
            f"position must be a jsvgd.flax.Position, got {type(position).__name__}; init_positions "
            "makes them"
        )
    key = jax.random.key(0)
    params = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), position.params
    )
    for name, own, expected in [
        ("likelihood", position.likelihood, jax.eval_shape(lambda: likelihood.init(key))),
        ("prior", position.prior, jax.eval_shape(lambda p: prior.init(key, p), params)),
    ]:
        found, wanted = (_shapes(tree) for tree in (own, expected))
        if found != wanted:
            raise ValueError(
                f"position is of another {name} than that of log_posterior: the {name}'s own "
                f"parameters must be {wanted}, got {found}; init_positions takes the same {name}"
            )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]] | str:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        return "none"
    return {jax.tree_util.keystr(path) or "a number": jnp.shape(leaf) for path, leaf in leaves}
