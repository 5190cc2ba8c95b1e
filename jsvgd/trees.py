"""Particles as pytrees: every leaf has a leading particle axis. To and from one (N, d) matrix."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["check_particles", "joined_names", "leaf_names", "settled", "to_matrix"]


def settled(tree: Any) -> Any:
    """The leaves without weak types, which ``jnp.full((5, 2), 1.0)`` has, or a learning rate in a state.

    A step drops them, and what was compiled for them would be compiled once more for what comes out.
    """
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf,
        tree,
    )


def check_particles(name: str, tree: Any) -> int:
    """The number of particles N of the pytree, or an error that names the leaf that does not fit."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise ValueError(
            f"{name} must hold at least one array with a leading particle axis, got {tree!r}"
        )
    counts = {}
    for path, leaf in leaves:
        where = name + jax.tree_util.keystr(path)
        if jnp.ndim(leaf) == 0:
            raise ValueError(f"{where} must have a leading particle axis, got a scalar")
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(f"{where} must have a floating dtype, got {jnp.result_type(leaf)}")
        counts.setdefault(jnp.shape(leaf)[0], where)
    if len(counts) > 1:
        found = ", ".join(f"{where}: {count}" for count, where in counts.items())
        raise ValueError(
            f"the leaves of {name} must agree in their number of particles, got {found}"
        )
    (count,) = counts
    if count == 0 or not any(jnp.size(leaf) for _, leaf in leaves):
        raise ValueError(
            f"{name} must hold at least one particle and one dimension, got {count} particles"
        )
    return count


def leaf_names(tree: Any) -> list[tuple[str, ...]]:
    """The path of every leaf as names, in the order of ``jax.tree.leaves``.

    The variable of an NNX parameter is one more node, whose child is called "value": it is left out.
    """
    nnx = sys.modules.get("flax.nnx")  # without it there are no such variables

    def is_variable(node):
        return nnx is not None and isinstance(node, nnx.Variable)

    found = []
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable):
        if is_variable(node):
            inner = jax.tree_util.tree_leaves_with_path(node)
            paths = [(*path, *below[1:]) for below, _ in inner]
        else:
            paths = [path]
        found += [tuple(jax.tree_util.keystr((k,), simple=True) for k in path) for path in paths]
    return found


def joined_names(what: str, names: list[tuple[str, ...]]) -> list[str]:
    """Names joined by dots, or an error where two different ones would become the same."""
    origin: dict[str, tuple[str, ...]] = {}
    for one in names:
        other = origin.setdefault(".".join(one), one)
        if other != one:
            raise ValueError(
                f"the {what} at {'/'.join(other)} and at {'/'.join(one)} would both be called "
                f"{'.'.join(one)!r}: rename one of them"
            )
    return [".".join(one) for one in names]


def to_matrix(tree: Any) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
    """The particles as one matrix, and the way back.

    Args:
      tree: pytree of arrays (N, ...).

    Returns:
      The matrix (N, d), float32 or wider, and a function from such a matrix to a pytree with the
      structure, shapes and dtypes of ``tree``.
    """
    leaves, structure = jax.tree.flatten(tree)
    shapes = [leaf.shape for leaf in leaves]
    dtypes = [leaf.dtype for leaf in leaves]
    dtype = jnp.promote_types(jnp.result_type(*leaves), jnp.float32)
    parts = [leaf.reshape(leaf.shape[0], -1).astype(dtype) for leaf in leaves]
    matrix = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def from_matrix(matrix):
        restored, start = [], 0
        for shape, leaf_dtype in zip(shapes, dtypes, strict=True):
            width = math.prod(shape[1:])
            part = matrix[:, start : start + width]
            restored.append(part.reshape(matrix.shape[0], *shape[1:]).astype(leaf_dtype))
            start += width
        return jax.tree.unflatten(structure, restored)

    return matrix, from_matrix
