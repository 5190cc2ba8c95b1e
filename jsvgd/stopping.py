"""Early stopping: callbacks of ``jsvgd.run`` that end a run when there is nothing left to gain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jsvgd.sampler import SVGDInfo, SVGDState
from jsvgd.trees import to_matrix

__all__ = ["StopOnKSD", "StopOnMovement"]


class StopOnMovement:
    """Ends a run whose particles have all but come to rest.

    Movement is the root mean square displacement of the particles since the record before, in units of
    their spread (the root mean square distance from their mean). A run ends where it was below
    ``tolerance`` at ``patience`` records in a row. The displacement is that of ``every`` steps, so
    ``every`` belongs to the tolerance. With minibatches particles never rest: what is left is noise.

    Its memory is not part of a checkpoint: a resumed run counts anew.

    Args:
      tolerance: positive.
      patience: records in a row, at least 1.
    """

    def __init__(self, tolerance: float = 1e-3, patience: int = 3):
        if not tolerance > 0:
            raise ValueError(f"tolerance must be positive, got {tolerance}")
        if patience < 1:
            raise ValueError(f"patience must be at least 1, got {patience}")
        self.tolerance, self.patience = tolerance, patience
        self._before, self._last_step, self._calm = None, -1, 0

    def __call__(self, step: int, state: SVGDState, info: SVGDInfo) -> bool:
        if step <= self._last_step:  # another run
            self._before, self._calm = None, 0
        before, self._before, self._last_step = self._before, state.particles, step
        if before is None:
            return False
        calm = bool(_movement(before, state.particles) < self.tolerance)
        self._calm = self._calm + 1 if calm else 0
        return self._calm >= self.patience


class StopOnKSD:
    """Ends a run whose kernel Stein discrepancy is small enough.

    Args:
      logdensity_fn: of ONE particle, as in ``jsvgd.svgd``.
      tolerance: ends the run where ``jsvgd.ksd`` of the particles is below this.
      args: further arguments of ``logdensity_fn``: the data, where it takes some.
      **options: of ``jsvgd.ksd``. The discrepancy of an independent sample falls as 1/sqrt(N), and
        grows with the dimension: a tolerance is found by looking at a run, not beforehand.
    """

    def __init__(self, logdensity_fn: Callable, tolerance: float, args: tuple = (), **options: Any):
        if not callable(logdensity_fn):
            raise TypeError(f"logdensity_fn must be a function, got {type(logdensity_fn).__name__}")
        if not tolerance > 0:
            raise ValueError(f"tolerance must be positive, got {tolerance}")
        from jsvgd.diagnostics import ksd

        self.tolerance = tolerance

        @jax.jit
        def discrepancy(particles, args):
            scores = jax.vmap(jax.grad(lambda x: logdensity_fn(x, *args)))(particles)
            return ksd(to_matrix(particles)[0], to_matrix(scores)[0], **options)

        self._discrepancy = lambda particles: discrepancy(particles, args)

    def __call__(self, step: int, state: SVGDState, info: SVGDInfo) -> bool:
        return bool(self._discrepancy(state.particles) < self.tolerance)


@jax.jit
def _movement(before, after) -> jax.Array:
    x, y = to_matrix(before)[0], to_matrix(after)[0]
    spread = jnp.mean(jnp.sum((y - jnp.mean(y, axis=0)) ** 2, axis=1))
    moved = jnp.mean(jnp.sum((y - x) ** 2, axis=1))
    # One particle, or coinciding ones, have no spread: then in units of the coordinates.
    return jnp.sqrt(moved / jnp.where(spread > 0, spread, 1.0))
