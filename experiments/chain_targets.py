"""Three targets for many chains: two modes, a banana, and a logistic regression on real data."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.command_line import InputError, require

__all__ = ["TARGETS", "Target", "long_nuts_run"]

MODES = np.array([[-3.0, 0.0], [3.0, 0.0]])
WEIGHTS = np.array([0.3, 0.7])


class Target(NamedTuple):
    """A density and what is known of it.

    Attributes:
      name: shown in tables.
      dimension: d.
      log_density: (d,) -> scalar, up to a constant.
      mean, sd: (d,) of the target; exact, or from NUTS.
      truth: where mean and sd come from.
      start_sd: particles start from N(0, start_sd^2 I).
    """

    name: str
    dimension: int
    log_density: Callable[[jax.Array], jax.Array]
    mean: np.ndarray
    sd: np.ndarray
    truth: str
    start_sd: float


def two_modes() -> Target:
    """0.3 N((-3, 0), I) + 0.7 N((3, 0), I): six standard deviations apart."""

    def log_density(x):
        squared = jnp.sum((x - jnp.asarray(MODES)) ** 2, axis=1)
        return jax.scipy.special.logsumexp(np.log(WEIGHTS) - 0.5 * squared)

    mean = WEIGHTS @ MODES
    variance = 1 + WEIGHTS @ (MODES - mean) ** 2
    return Target("two modes", 2, log_density, mean, np.sqrt(variance), "exact", 3.0)


def banana(curvature: float = 0.5) -> Target:
    """x_1 ~ N(0, 2^2), x_2 ~ N(curvature (x_1^2 - 4), 1)."""

    def log_density(x):
        return -0.5 * (x[0] ** 2 / 4 + (x[1] - curvature * (x[0] ** 2 - 4)) ** 2)

    # The variance of x_1^2 is 2 * 4^2.
    sd = np.array([2.0, math.sqrt(1 + 32 * curvature**2)])
    return Target("banana", 2, log_density, np.zeros(2), sd, "exact", 1.0)


def logistic_regression(num_draws: int = 4000) -> Target:
    """Scikit-learn's breast cancer data (569 x 30, standardised), all coefficients N(0, 1)."""
    inputs, targets = require("sklearn.datasets").load_breast_cancer(return_X_y=True)
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    design = jnp.asarray(np.column_stack([np.ones(len(inputs)), inputs]), jnp.float32)
    signs = jnp.asarray(2 * targets - 1, jnp.float32)

    def log_density(x):
        return jnp.sum(jax.nn.log_sigmoid(signs * (design @ x))) - 0.5 * jnp.sum(x**2)

    draws = long_nuts_run(jax.random.key(0), log_density, design.shape[1], num_draws)
    return Target(
        "breast cancer",
        design.shape[1],
        log_density,
        draws.mean(0),
        draws.std(0),
        f"NUTS, {len(draws)} draws",
        1.0,
    )


TARGETS = {
    "two_modes": two_modes,
    "banana": banana,
    "breast_cancer": logistic_regression,
}


def long_nuts_run(rng_key, log_density, dimension, num_draws, num_warmup=500) -> np.ndarray:
    """Draws of BlackJAX's NUTS, (num_draws, d), four chains in turn, each adapted on its own."""
    try:
        import blackjax
    except ImportError as error:
        raise InputError(f"BlackJAX is needed: pip install blackjax ({error})") from error

    @functools.partial(jax.jit, static_argnums=1)
    def chain(rng_key, steps):
        warmup_key, draw_key = jax.random.split(rng_key)
        adaptation = blackjax.window_adaptation(blackjax.nuts, log_density)
        (state, parameters), _ = adaptation.run(warmup_key, jnp.zeros(dimension), num_warmup)
        step = blackjax.nuts(log_density, **parameters).step

        def one(state, key):
            state, _ = step(key, state)
            return state, state.position

        return jax.lax.scan(one, state, jax.random.split(draw_key, steps))[1]

    keys = jax.random.split(rng_key, 4)
    return np.concatenate([np.asarray(chain(key, -(-num_draws // 4))) for key in keys])
