"""Targets with known answers: seven posteriors of posteriordb, and three analytic densities.

Every log density takes ONE unconstrained vector (d,) and includes the log-Jacobian of its transformation;
``constrain`` gives the parameters as the reference draws have them. The models are those of posteriordb
(https://github.com/stan-dev/posteriordb), written in JAX; constants are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.command_line import InputError

__all__ = ["MODELS", "Target", "analytic_targets", "load_posterior"]


class Target(NamedTuple):
    """A density and what is known about it.

    Attributes:
      name: for tables.
      dimension: d of the unconstrained vector.
      logdensity: unconstrained (d,) -> scalar.
      constrain: unconstrained (d,) -> parameters (p,).
      parameters: their p names.
      draws: reference draws of the parameters, (M, p), float64.
      unconstrained_draws: the same, (M, d).
      mean, sd: of the parameters, (p,); exact where known, of all reference draws otherwise.
    """

    name: str
    dimension: int
    logdensity: Callable
    constrain: Callable
    parameters: list[str]
    draws: np.ndarray
    unconstrained_draws: np.ndarray
    mean: np.ndarray
    sd: np.ndarray


def _normal(residuals, log_sd):
    """log density of residuals ~ N(0, sd^2), without constants."""
    return -0.5 * jnp.sum((residuals * jnp.exp(-log_sd)) ** 2) - residuals.size * log_sd


def _half_cauchy_of_log(log_value, scale):
    """Half-Cauchy prior of a positive parameter, with the Jacobian of its logarithm."""
    return -jnp.log1p((jnp.exp(log_value) / scale) ** 2) + log_value


def _regression(design, outcome, log_prior):
    """y ~ N(X beta, sigma), unconstrained (beta, log sigma)."""

    def logdensity(u):
        beta, log_sigma = u[:-1], u[-1]
        prior = log_prior(beta, log_sigma)
        return _normal(outcome - _product(design, beta), log_sigma) + prior

    def constrain(u):
        return u.at[-1].set(jnp.exp(u[-1]))

    return design.shape[1] + 1, logdensity, constrain


def _log_last(draws):
    return np.concatenate([draws[:, :-1], np.log(draws[:, -1:])], axis=1)


def _eight_schools_back(draws):
    theta, mu, tau = draws[:, :-2], draws[:, -2:-1], draws[:, -1:]
    return np.concatenate([(theta - mu) / tau, mu, np.log(tau)], axis=1)


def _garch_back(draws):
    mu, alpha0, alpha1, beta1 = draws.T
    return np.stack([mu, np.log(alpha0), _logit(alpha1), _logit(beta1 / (1 - alpha1))], axis=1)


def _logit(p):
    return np.log(p) - np.log1p(-p)


def _product(matrix, vector):
    return jnp.matmul(matrix, vector, precision=jax.lax.Precision.HIGHEST)


def _columns(data, *names):
    return [np.asarray(data[name], np.float64) for name in names]


def _ark(data):
    y, lags = np.asarray(data["y"]), data["K"]
    columns = [np.ones(len(y) - lags), *(y[lags - k : -k] for k in range(1, lags + 1))]

    def prior(beta, log_sigma):
        return -0.5 * jnp.sum((beta / 10) ** 2) + _half_cauchy_of_log(log_sigma, 2.5)

    return _regression(np.stack(columns, axis=1), y[lags:], prior)


def _eight_schools(data):
    y, sd = _columns(data, "y", "sigma")

    def school_effects(u):
        return u[:-2] * jnp.exp(u[-1]) + u[-2]

    def logdensity(u):
        mu, log_tau = u[-2:]
        likelihood = -0.5 * jnp.sum(((y - school_effects(u)) / sd) ** 2)
        prior = -0.5 * jnp.sum(u[:-2] ** 2) - 0.5 * (mu / 5) ** 2
        return likelihood + prior + _half_cauchy_of_log(log_tau, 5.0)

    def constrain(u):
        return jnp.concatenate([school_effects(u), u[-2:-1], jnp.exp(u[-1:])])

    return len(y) + 2, logdensity, constrain


def _garch(data):
    y, first = np.asarray(data["y"]), data["sigma1"]

    def constrain(u):
        alpha1 = jax.nn.sigmoid(u[2])
        return jnp.stack([u[0], jnp.exp(u[1]), alpha1, (1 - alpha1) * jax.nn.sigmoid(u[3])])

    def logdensity(u):
        mu, alpha0, alpha1, beta1 = constrain(u)
        jacobian = u[1] + 2 * jax.nn.log_sigmoid(-u[2]) + jax.nn.log_sigmoid(u[2])
        jacobian += jax.nn.log_sigmoid(u[3]) + jax.nn.log_sigmoid(-u[3])
        residuals = y - mu
        # variance_t = c_t + beta1 variance_{t-1}: a linear recurrence, in log T passes.
        c = jnp.concatenate(
            [jnp.full((1,), first**2, u.dtype), alpha0 + alpha1 * residuals[:-1] ** 2]
        )
        b = jnp.full_like(c, beta1)

        def compose(earlier, later):
            return later[0] * earlier[0], later[1] + later[0] * earlier[1]

        _, variance = jax.lax.associative_scan(compose, (b, c))
        return -0.5 * jnp.sum(residuals**2 / variance + jnp.log(variance)) + jacobian

    return 4, logdensity, constrain


def _kidscore(data):
    score, high_school, iq = _columns(data, "kid_score", "mom_hs", "mom_iq")
    design = np.stack([np.ones_like(score), high_school, iq], axis=1)
    return _regression(design, score, lambda beta, log_sigma: _half_cauchy_of_log(log_sigma, 2.5))


def _logmesquite(data):
    names = ("diam1", "diam2", "canopy_height", "total_height", "density")
    weight, *sizes = (np.log(a) for a in _columns(data, "weight", *names))
    design = np.stack([np.ones_like(weight), *sizes, *_columns(data, "group")], axis=1)
    return _regression(design, weight, lambda beta, log_sigma: log_sigma)


def _nes(data):
    party, age = _columns(data, "partyid7", "age_discrete")
    ideology, race, education, gender, income = _columns(
        data, "real_ideo", "race_adj", "educ1", "gender", "income"
    )
    ages = [(age == group).astype(float) for group in (2, 3, 4)]
    columns = [np.ones_like(party), ideology, race, *ages, education, gender, income]
    return _regression(np.stack(columns, axis=1), party, lambda beta, log_sigma: log_sigma)


def _sblri(data):
    design, y = _columns(data, "X", "y")

    def prior(beta, log_sigma):
        scale = -0.5 * (jnp.exp(log_sigma) / 10) ** 2
        return -0.5 * jnp.sum((beta / 10) ** 2) + scale + log_sigma

    return _regression(design, y, prior)


MODELS = {
    "eight_schools-eight_schools_noncentered": _eight_schools,
    "kidiq-kidscore_momhsiq": _kidscore,
    "sblri-blr": _sblri,
    "nes1980-nes": _nes,
    "mesquite-logmesquite": _logmesquite,
    "arK-arK": _ark,
    "garch-garch11": _garch,
}

# From parameters to the unconstrained vector; the regressions take the logarithm of the last.
_BACK = {
    "eight_schools-eight_schools_noncentered": _eight_schools_back,
    "garch-garch11": _garch_back,
}
_ORDER = {"eight_schools-eight_schools_noncentered": [f"theta[{i}]" for i in range(1, 9)]}


def load_posterior(folder: Path) -> Target:
    """The posterior of a folder with ``data.json`` and ``reference_draws.npz`` (names, draws).

    Raises:
      InputError: for a folder of another name or without these files.
    """
    folder = Path(folder)
    if folder.name not in MODELS:
        raise InputError(f"no model is known for {folder.name!r}: expected one of {list(MODELS)}")
    try:
        data = json.loads((folder / "data.json").read_text())
        with np.load(folder / "reference_draws.npz") as reference:
            names, draws = [str(n) for n in reference["names"]], reference["draws"]
    except OSError as error:
        raise InputError(f"the data of {folder.name} cannot be read: {error}") from error
    dimension, logdensity, constrain = MODELS[folder.name](data)
    draws = np.asarray(draws, np.float64).reshape(-1, draws.shape[-1])
    if folder.name in _ORDER:
        order = [*_ORDER[folder.name], "mu", "tau"]
        draws, names = draws[:, [names.index(name) for name in order]], order
    return Target(
        folder.name,
        dimension,
        logdensity,
        constrain,
        names,
        draws,
        _BACK.get(folder.name, _log_last)(draws),
        draws.mean(0),
        draws.std(0, ddof=1),
    )


def analytic_targets(num_draws: int = 10_000) -> list[Target]:
    """N(0, I_50), a Gaussian of condition number 1000 in 20 dimensions, and a banana."""
    rng = np.random.default_rng(20)
    rotation = np.linalg.qr(rng.normal(size=(20, 20)))[0]
    root = rotation * np.sqrt(np.geomspace(1, 1000, 20))
    covariance = root @ root.T
    precision = np.linalg.inv(covariance)

    def ill_conditioned(u):
        return -0.5 * u @ _product(precision, u)

    def standard(u):
        return -0.5 * jnp.sum(u**2)

    def banana(u):
        return -0.5 * u[0] ** 2 - 2 * (u[1] - u[0] ** 2 + 1) ** 2

    x = rng.normal(size=num_draws)
    y = x**2 - 1 + 0.5 * rng.normal(size=num_draws)
    normal = rng.normal(size=(num_draws, 50))

    def target(name, logdensity, draws, sd):
        d = draws.shape[1]
        names = [f"x[{i}]" for i in range(1, d + 1)]
        return Target(
            name, d, logdensity, lambda u: u, names, draws, draws, np.zeros(d), np.asarray(sd)
        )

    return [
        target("normal-50", standard, normal, np.ones(50)),
        target(
            "gaussian-20-condition-1000",
            ill_conditioned,
            normal[:, :20] @ root.T,
            np.sqrt(np.diag(covariance)),
        ),
        # Var(x^2 - 1) = 2, plus 0.25.
        target("banana", banana, np.stack([x, y], axis=1), [1.0, 1.5]),
    ]
