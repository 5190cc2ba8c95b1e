"""The progress bar of ``jsvgd.run``: the numbers that tell whether a run goes well."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from jsvgd.sampler import SVGDInfo, SVGDState

__all__ = ["progress_bar", "spread"]


@contextlib.contextmanager
def progress_bar(
    shown: bool, num_steps: int, made: int
) -> Iterator[Callable[[int, SVGDInfo, SVGDState], None]]:
    """A function ``show(steps made, info, state)``; it does nothing where no bar is asked for."""
    if not shown:
        yield lambda made, info, state: None
        return
    from tqdm.auto import tqdm  # a bar is asked for rarely, and importing it takes time

    with tqdm(total=num_steps, initial=made, unit="step") as bar:

        def show(made, info, state):
            bar.update(made - bar.n)
            bar.set_postfix(_numbers(info, state), refresh=False)

        yield show


@jax.jit
def spread(particles) -> jax.Array:
    """Root mean square of the particles' standard deviations, over all dimensions."""
    leaves = [
        leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in _leaves(particles)
    ]
    variances = sum(jnp.sum(jnp.var(leaf, axis=0)) for leaf in leaves)
    return jnp.sqrt(variances / sum(leaf[0].size for leaf in leaves))


def _leaves(tree):
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def _numbers(info: SVGDInfo, state: SVGDState) -> dict[str, str]:
    bandwidths = [jnp.mean(h) for h in jax.tree.leaves(info.bandwidth)]
    numbers = {
        "log p": info.log_density,
        "bandwidth": sum(bandwidths) / len(bandwidths),
        "spread": spread(state.particles),
        "direction": info.direction_norm,
    }
    shown = {name: f"{float(value):.4g}" for name, value in numbers.items()}
    lost = int(info.num_nonfinite)
    return {**shown, "non-finite": str(lost)} if lost else shown
