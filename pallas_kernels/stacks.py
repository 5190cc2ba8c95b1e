"""A batch that a kernel can see: vmap as one leading axis.

``pallas_call`` and ``plgpu.kernel`` have a vmap of their own, which would hide the batch from the choice of
tiles: what fills the device for one problem is too much for sixty-four.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["over_stacks"]


def over_stacks(batched):
    """A function of one problem from one of a stack; its vmap, however deep, is one call of the latter.

    Args:
      batched: maps arrays with a leading axis B to an array or a tuple of arrays with that axis.
    """

    @jax.custom_batching.custom_vmap
    def stacked(*arrays):
        return batched(*arrays)

    @stacked.def_vmap
    def _(axis_size, in_batched, *arrays):
        full = _with_axis(axis_size, in_batched, arrays)
        out = stacked(*[x.reshape(-1, *x.shape[2:]) for x in full])
        split = lambda x: x.reshape(axis_size, -1, *x.shape[1:])
        return jax.tree.map(split, out), jax.tree.map(lambda _: True, out)

    @jax.custom_batching.custom_vmap
    def single(*arrays):
        return jax.tree.map(lambda x: x[0], batched(*[x[None] for x in arrays]))

    @single.def_vmap
    def _(axis_size, in_batched, *arrays):
        out = stacked(*_with_axis(axis_size, in_batched, arrays))
        return out, jax.tree.map(lambda _: True, out)

    return single


def _with_axis(axis_size, in_batched, arrays):
    return [
        x if b else jnp.broadcast_to(x, (axis_size, *x.shape))
        for x, b in zip(arrays, in_batched, strict=True)
    ]
