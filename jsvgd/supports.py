"""Parameters with a support: positive, bounded, on a simplex. NumPyro's transformations do the work.

They are needed where ``jsvgd.fit`` is given ``supports``; NumPyro is imported only then
(``pip install numpyro``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["VectorDensity", "resolve_supports", "unconstrain"]

_NAMES = '"real", "positive", "unit", "simplex", ("interval", low, high), ("greater_than", low)'


@dataclasses.dataclass(frozen=True, eq=False)
class _Given:
    """A NumPyro constraint or transformation of the user's: compared as an object."""

    transformation: Any


def resolve_supports(supports: Any, particles: Any) -> tuple:
    """One hashable support a leaf of the particles, None for the whole real line.

    Args:
      supports: None; one support for all leaves; or a pytree of supports with the structure of the
        particles (of a dict, keys may be left out: they are real). A support is "real",
        "positive", "unit" (0 to 1), "simplex" (last axis, of sum 1 to 1e-3), ("interval", low, high),
        ("greater_than", low), or a constraint or transformation of ``numpyro.distributions``.
      particles: pytree of arrays.

    Raises:
      ValueError: for unknown names and another structure.
    """
    structure = jax.tree.structure(particles)
    if supports is None or _is_support(supports):
        return (_check(supports),) * structure.num_leaves
    if isinstance(supports, dict) and isinstance(particles, dict):
        unknown = sorted(set(supports) - set(particles))
        if unknown:
            raise ValueError(f"supports names {unknown}, which particles does not have")
        supports = {key: supports.get(key, "real") for key in particles}
        # A support may stand for all leaves below its key.
        flat = [
            one
            for key in sorted(particles)
            for one in resolve_supports(supports[key], particles[key])
        ]
        return tuple(flat)
    leaves, given = jax.tree.flatten(supports, is_leaf=_is_support)
    if given != structure:
        raise ValueError(f"supports must have the structure of particles, {structure}, got {given}")
    return tuple(_check(leaf) for leaf in leaves)


def _is_support(value) -> bool:
    if value is None or isinstance(value, (str, _Given)):
        return True
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        return True
    return hasattr(value, "log_abs_det_jacobian") or hasattr(value, "feasible_like")


def _check(support):
    if support is None or support == "real":
        return None
    if isinstance(support, str) and support in ("positive", "unit", "simplex"):
        return support
    if isinstance(support, tuple) and isinstance(support[0], str):
        kind, *bounds = support
        if (kind, len(bounds)) in (("interval", 2), ("greater_than", 1)):
            bounds = tuple(float(bound) for bound in bounds)
            if kind == "interval" and not bounds[0] < bounds[1]:
                raise ValueError(f"supports: an interval must have low < high, got {support!r}")
            return (kind, *bounds)
    elif not isinstance(support, str) and _is_support(support):
        return _Given(support)
    raise ValueError(f"supports must be {_NAMES} or of NumPyro, got {support!r}")


def _transformation(support):
    """From the unconstrained to the constrained leaf."""
    try:
        from numpyro.distributions import biject_to, constraints
    except ImportError as error:
        raise ImportError(
            "supports need the transformations of NumPyro: pip install numpyro"
        ) from error
    if isinstance(support, _Given):
        given = support.transformation
        return given if hasattr(given, "log_abs_det_jacobian") else biject_to(given)
    if isinstance(support, tuple):
        kind, *bounds = support
        return biject_to(getattr(constraints, kind)(*bounds))
    name = {"unit": "unit_interval"}.get(support, support)
    return biject_to(getattr(constraints, name))


def _inverse(support):
    """From the constrained to the unconstrained leaf of one particle."""
    transformation = _transformation(support)
    if not _is_simplex(support):
        return transformation.inv

    def inverse(value):
        # A row of sum 3 has an inverse, too: that of another row.
        inside = jnp.all(jnp.abs(jnp.sum(value, axis=-1) - 1) <= 1e-3) & jnp.all(value >= 0)
        return jnp.where(inside, transformation.inv(value), jnp.nan)

    return inverse


def _is_simplex(support) -> bool:
    if isinstance(support, _Given):
        from numpyro.distributions import constraints

        return support.transformation is constraints.simplex
    return support == "simplex"


def unconstrain(supports: tuple, particles: Any) -> Any:
    """The particles on the whole real line, leaf by leaf; values outside a support give NaN."""
    leaves, structure = jax.tree.flatten(particles)
    return jax.tree.unflatten(
        structure,
        [
            leaf if support is None else jax.vmap(_inverse(support))(leaf)
            for support, leaf in zip(supports, leaves, strict=True)
        ],
    )


@dataclasses.dataclass(frozen=True)
class VectorDensity:
    """The log density of an unconstrained vector (d,), log-Jacobians included. Hashable.

    Attributes:
      logdensity_fn: of one particle, a pytree.
      structure: its tree structure.
      shapes: of its unconstrained leaves, without the particle axis.
      dtypes: of its leaves.
      supports: one a leaf, from ``resolve_supports``.
    """

    logdensity_fn: Callable
    structure: Any
    shapes: tuple
    dtypes: tuple
    supports: tuple

    @classmethod
    def of(cls, logdensity_fn, unconstrained, supports) -> VectorDensity:
        leaves, structure = jax.tree.flatten(unconstrained)
        shapes = tuple(leaf.shape[1:] for leaf in leaves)
        return cls(logdensity_fn, structure, shapes, tuple(a.dtype for a in leaves), supports)

    def position(self, vector: jax.Array) -> tuple[Any, jax.Array]:
        """The particle as the user has it, and the log-Jacobian of the transformations."""
        leaves, log_jacobian, start = [], jnp.zeros((), vector.dtype), 0
        for shape, dtype, support in zip(self.shapes, self.dtypes, self.supports, strict=True):
            size = math.prod(shape)
            leaf = vector[start : start + size].reshape(shape).astype(dtype)
            start += size
            if support is not None:
                transformation = _transformation(support)
                constrained = transformation(leaf)
                terms = transformation.log_abs_det_jacobian(leaf, constrained)
                log_jacobian += jnp.sum(terms).astype(vector.dtype)
                leaf = constrained
            leaves.append(leaf)
        return jax.tree.unflatten(self.structure, leaves), log_jacobian

    def __call__(self, vector: jax.Array) -> jax.Array:
        position, log_jacobian = self.position(vector)
        value = self.logdensity_fn(position)
        if jnp.shape(value):
            raise ValueError(
                f"logdensity_fn must return a scalar for one particle, got shape {value.shape}"
            )
        return value + log_jacobian
