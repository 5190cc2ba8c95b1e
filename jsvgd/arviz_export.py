"""Particles as an ArviZ data set: named variables, coordinates, log likelihood and predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jsvgd.trees import check_particles, joined_names, leaf_names

__all__ = ["to_arviz"]


def to_arviz(
    particles: Any,
    *,
    chains: bool = False,
    names: Sequence[str] | None = None,
    transform: Callable[[Any], Any] | None = None,
    log_likelihood: Any = None,
    posterior_predictive: Any = None,
    predictions: Any = None,
    observed_data: Mapping[str, Any] | None = None,
    coords: Mapping[str, Sequence] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    attrs: Mapping[str, Any] | None = None,
):
    """An ``xarray.DataTree`` that ``arviz`` summarises, plots and compares.

    Particles become draws: of one chain, or with ``chains=True`` of as many as there were vmapped
    runs. They are no Markov chain and have no order: the effective sample size of ``az.summary``
    measures nothing for one run, and R-hat is worth reading between chains alone.

    Args:
      particles: pytree of arrays (N, ...); with ``chains=True`` (C, N, ...). Variables are named
        after their path in it, "layer.kernel"; a bare array is called "x".
      chains: whether the first axis counts chains.
      names: for particles that are one matrix, (N, d) or (C, N, d): a scalar variable for each column.
      transform: maps ONE particle to the pytree to be stored: parameters on their own scale, say.
      log_likelihood: log density of each observation; a dict from the name of an observed variable to
        an array (N, observations) or (C, N, observations), or to a function of one particle that
        returns (observations,); an array or function alone is that of "y". ``az.loo`` needs it.
      posterior_predictive, predictions: draws of, or means for, observed and new rows; given like
        ``log_likelihood``.
      observed_data: name to array, without the particle axis.
      coords, dims: names of coordinates and dimensions of the variables, as in ``arviz.from_dict``.
      attrs: further attributes of the posterior group.

    Returns:
      ``xarray.DataTree`` with the groups posterior, and log_likelihood, posterior_predictive,
      predictions and observed_data where given.

    Raises:
      ImportError: where ArviZ 1 is not installed (it needs Python 3.12 or newer).
      ValueError: where shapes or names do not fit, or two variables would have one name.
    """
    arviz = _arviz()
    check_particles("particles", particles)
    shape = (2 if chains else 1,)
    lead = _leading_shape(particles, *shape)
    per_particle = _over_particles(particles, chains)

    stored = particles if transform is None else per_particle(transform)
    posterior = _variables(stored, lead, names, chains)
    groups: dict[str, dict[str, np.ndarray]] = {"posterior": posterior}
    for group, given in {
        "log_likelihood": log_likelihood,
        "posterior_predictive": posterior_predictive,
        "predictions": predictions,
    }.items():
        if given is None:
            continue
        given = given if isinstance(given, Mapping) else {"y": given}
        arrays = {k: per_particle(v) if callable(v) else v for k, v in given.items()}
        groups[group] = {
            k: _with_chains(f"{group}[{k!r}]", v, lead, chains) for k, v in arrays.items()
        }
    if observed_data is not None:
        groups["observed_data"] = {k: np.asarray(v) for k, v in observed_data.items()}
    about = {"inference_library": "jsvgd", **dict(attrs or {})}
    return arviz.from_dict(
        groups,
        coords=None if coords is None else dict(coords),
        dims=None if dims is None else {k: list(v) for k, v in dims.items()},
        attrs={"posterior": about},
    )


def _arviz():
    try:
        import arviz
    except ImportError as error:
        raise ImportError(
            f"to_arviz needs ArviZ 1 and Python 3.12: pip install 'jsvgd[arviz]' ({error})"
        ) from error
    version = arviz.__version__
    if int(version.split(".")[0]) < 1:
        raise ImportError(
            f"to_arviz needs ArviZ 1 and Python 3.12, found ArviZ {version}: "
            "pip install 'jsvgd[arviz]'"
        )
    return arviz


def _leading_shape(particles, axes: int) -> tuple[int, int]:
    leads = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(particles):
        if jnp.ndim(leaf) < axes:
            raise ValueError(
                f"particles{jax.tree_util.keystr(path)} must have a chain and a particle axis, "
                f"got shape {jnp.shape(leaf)}"
            )
        leads.add(jnp.shape(leaf)[:axes])
    if len(leads) > 1:
        raise ValueError(f"the leaves of particles must agree in chains and particles, got {leads}")
    (lead,) = leads
    return lead if axes == 2 else (1, *lead)


def _over_particles(particles, chains: bool):
    def apply(function):
        mapped = jax.vmap(jax.vmap(function)) if chains else jax.vmap(function)
        return jax.jit(mapped)(particles)

    return apply


def _variables(tree, lead, names, chains) -> dict[str, np.ndarray]:
    if names is not None:
        matrix = np.asarray(tree) if not isinstance(tree, (Mapping, list, tuple)) else None
        columns = None if matrix is None else matrix.shape[-1]
        if columns != len(names) or len(set(names)) != len(names):
            raise ValueError(
                f"names must be {columns} different names, one for each column of particles, "
                f"got {list(names)}"
            )
        matrix = _with_chains("particles", matrix, lead, chains)
        return {name: matrix[..., i] for i, name in enumerate(names)}
    labels = joined_names("variables", leaf_names(tree))
    return {
        name or "x": _with_chains(f"particles[{name!r}]", leaf, lead, chains)
        for name, leaf in zip(labels, jax.tree.leaves(tree), strict=True)
    }


def _with_chains(name, array, lead, chains: bool) -> np.ndarray:
    """The array as (chains, particles, ...); half precision, which xarray cannot hold, as float32."""
    array = np.asarray(array)
    if array.dtype == jnp.bfloat16:
        array = array.astype(np.float32)
    num_chains, count = lead
    # One chain of one particle: (1, 1) is a particle of one dimension, not a chain axis.
    if not chains and array.shape[:1] == (count,) and (count == 1 or array.shape[:2] != lead):
        array = array[None]
    if array.shape[:2] != lead:
        expected = f"({num_chains}, {count}, ...)" if chains else f"({count}, ...)"
        raise ValueError(f"{name} must have shape {expected}, got {array.shape}")
    return array
