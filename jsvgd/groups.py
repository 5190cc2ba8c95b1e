"""One kernel a group of leaves: SVGD of each layer of a network on its own.

A kernel over all d coordinates of a large network sees all particles equally far apart, and the repulsion
a coordinate gets falls as 1/d. With one kernel a layer the distances are those within the layer, as in
message-passing SVGD (Zhuo et al., 2018; Wang, Zeng and Liu, 2018), whose graph has no edges here:

    phi_g(x_i) = 1/N sum_j [ k_g(x_j^g, x_i^g) s_j^g + grad k_g(x_j^g, x_i^g) ]      for each group g
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jsvgd.transform import ScaleBySVGDState, scale_by_svgd
from jsvgd.trees import check_particles, joined_names, leaf_names

__all__ = ["PerGroupState", "group_labels", "scale_by_svgd_per_group", "split_groups"]


class PerGroupState(NamedTuple):
    """State of ``scale_by_svgd_per_group``.

    Attributes:
      count: updates made so far, int32.
      groups: the state of ``scale_by_svgd`` a group, by its label.
    """

    count: jax.Array
    groups: dict[str, ScaleBySVGDState]

    @property
    def bandwidth(self) -> dict[str, jax.Array]:
        """The bandwidth of the last update, by group."""
        return {label: state.bandwidth for label, state in self.groups.items()}


def scale_by_svgd_per_group(
    groups: str | Callable[[tuple[str, ...]], str] = "layer",
    *,
    kernel="rbf",
    bandwidth="median",
    preconditioner=None,
    refresh_every: int | None = 5,
    temperature=1.0,
    repulsion=1.0,
    precision: str = "high",
    implementation: str | None = None,
) -> optax.GradientTransformation:
    """``scale_by_svgd`` with a kernel, a bandwidth and a preconditioner of its own for each group.

    Args:
      groups: "layer" puts leaves together that differ in the last part of their path alone (kernel and
        bias), "leaf" takes each leaf for itself; or a function from the path, a tuple of names such
        as ("params", "hidden", "kernel"), to the label of the group.
      kernel, bandwidth, preconditioner, refresh_every, temperature, repulsion, precision,
        implementation: of ``scale_by_svgd``.

    Returns:
      An ``optax.GradientTransformation`` whose ``update`` needs ``params``.

    Raises:
      ValueError: for an unknown name of ``groups``.
      TypeError: where ``groups`` is neither a name nor a function.

    Example:
      >>> import jax.numpy as jnp
      >>> transform = scale_by_svgd_per_group("leaf", bandwidth=1.0)
      >>> particles = {"a": jnp.ones((5, 2)), "b": jnp.zeros((5, 3))}
      >>> sorted(transform.init(particles).groups)
      ['a', 'b']
    """
    _as_labelling(groups)
    inner = scale_by_svgd(
        kernel=kernel,
        bandwidth=bandwidth,
        preconditioner=preconditioner,
        refresh_every=refresh_every,
        temperature=temperature,
        repulsion=repulsion,
        precision=precision,
        implementation=implementation,
    )

    def init(params):
        check_particles("params", params)
        return PerGroupState(
            jnp.zeros((), jnp.int32),
            {label: inner.init(part) for label, part in split_groups(params, groups).items()},
        )

    def update(updates, state, params=None):
        if params is None:
            raise ValueError(
                "scale_by_svgd_per_group needs the particles: call update(updates, state, params)"
            )
        structure = jax.tree.structure(params)
        if jax.tree.structure(updates) != structure:
            raise ValueError(
                f"updates must have the structure of params, {structure}, "
                f"got {jax.tree.structure(updates)}"
            )
        gradients, particles = split_groups(updates, groups), split_groups(params, groups)
        moves, states = {}, {}
        for label, part in particles.items():
            moves[label], states[label] = inner.update(gradients[label], state.groups[label], part)
        flat = {index: leaf for part in moves.values() for index, leaf in part.items()}
        leaves = [flat[index] for index in range(len(flat))]
        return jax.tree.unflatten(structure, leaves), PerGroupState(state.count + 1, states)

    return optax.GradientTransformation(init, update)


def group_labels(
    params: Any, groups: str | Callable[[tuple[str, ...]], str] = "layer"
) -> list[str]:
    """The group of every leaf, in the order of ``jax.tree.leaves``.

    Raises:
      ValueError: where two layers, or leaves, would have one label: ``{"a": {"b": x}, "a.b": y}``.
    """
    return _as_labelling(groups)(leaf_names(params))


def split_groups(
    tree: Any, groups: str | Callable[[tuple[str, ...]], str] = "layer"
) -> dict[str, dict[int, jax.Array]]:
    """The leaves by group, each under its place among all leaves."""
    parts: dict[str, dict[int, jax.Array]] = {}
    labels = group_labels(tree, groups)
    for index, (label, leaf) in enumerate(zip(labels, jax.tree.leaves(tree), strict=True)):
        parts.setdefault(label, {})[index] = leaf
    return parts


def _as_labelling(groups) -> Callable[[list[tuple[str, ...]]], list[str]]:
    if callable(groups):
        return lambda names: [str(groups(one)) for one in names]
    if not isinstance(groups, str):
        raise TypeError(
            f'groups must be "layer", "leaf" or a function of the path, got {type(groups).__name__}'
        )
    if groups == "layer":
        return lambda names: joined_names("layers", [one[:-1] for one in names])
    if groups == "leaf":
        return lambda names: joined_names("leaves", names)
    raise ValueError(f'groups must be "layer", "leaf" or a function of the path, got {groups!r}')
