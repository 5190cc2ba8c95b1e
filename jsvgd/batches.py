"""Where the minibatches of ``jsvgd.run`` come from: arrays, or any Python iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["ALL_ROWS", "STREAM", "Stream", "batch_chooser", "count_rows", "is_stream"]

# How a step finds its batch, where that is no batch size: static arguments of the compiled steps.
ALL_ROWS, STREAM = "all rows", "stream"

# Batches of a stream that one compiled call takes, and the numbers that they may hold together.
_BATCHES_A_CALL = 64
_ELEMENTS_A_CALL = 1 << 24


def is_stream(data: Any) -> bool:
    """Whether ``data`` gives batches one by one, rather than arrays of all rows."""
    if data is None or isinstance(data, (str, bytes)) or hasattr(data, "shape"):
        return False
    is_leaf = jax.tree_util.all_leaves([data])
    return is_leaf and (callable(data) or isinstance(data, Iterable))


def count_rows(data: Any) -> int:
    """Rows of the arrays of ``data``, or an error that says where they do not fit together."""
    leaves = jax.tree.leaves(data)
    shapes = [jnp.shape(leaf) for leaf in leaves]
    if not leaves or any(len(shape) == 0 for shape in shapes):
        raise ValueError(f"data must hold arrays with a leading axis of rows, got shapes {shapes}")
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            f"the arrays of data must agree in their number of rows, got shapes {shapes}"
        )
    if shapes[0][0] == 0:
        raise ValueError(f"data must hold at least one row, got shapes {shapes}")
    return shapes[0][0]


def batch_chooser(
    choice: str | int | None, order_key: jax.Array, data: Any, first_step: jax.Array
) -> tuple[Callable, Callable]:
    """How a compiled step finds its batch.

    Args:
      choice: None (no data), ``ALL_ROWS``, ``STREAM`` or a batch size.
      order_key: of the order of the minibatches.
      data: arrays with a leading axis of rows, or of batches for a stream.
      first_step: the step that the first batch of a stream belongs to.

    Returns:
      ``order(step)``, what a step needs to carry along (the permutation of its epoch), and
      ``choose(step, order) -> (arguments of the log density, order)``.
    """
    no_order = jnp.zeros((), jnp.int32)
    if choice is None:
        return lambda step: no_order, lambda step, order: ((), order)
    if choice == ALL_ROWS:
        return lambda step: no_order, lambda step, order: ((data,), order)
    if choice == STREAM:

        def next_batch(step, order):
            return (jax.tree.map(lambda a: a[step - first_step], data),), order

        return lambda step: no_order, next_batch

    rows = count_rows(data)
    batches_an_epoch = rows // choice

    def order_at(step):
        epoch_key = jax.random.fold_in(order_key, step // batches_an_epoch)
        return jax.random.permutation(epoch_key, rows)

    def minibatch(step, order):
        position = step % batches_an_epoch
        order = jax.lax.cond(position == 0, order_at, lambda _: order, step)
        index = jax.lax.dynamic_slice_in_dim(order, position * choice, choice)
        return (jax.tree.map(lambda a: a[index], data),), order

    return order_at, minibatch


class Stream:
    """Batches one by one, stacked for a compiled call.

    Args:
      data: an iterator of batches; an iterable, begun anew where it ends; or a function that takes
        the number of a step and returns the iterator of the batches from that step on.
      step: the step of the first batch.
    """

    def __init__(self, data: Any, step: int):
        self._data, self._step = data, step
        self._iterator = self._open(step)
        self._waiting: list = []

    def _open(self, step: int) -> Iterator:
        if callable(self._data):
            return iter(self._data(step))
        return self._data if isinstance(self._data, Iterator) else _epochs(self._data)

    def example(self) -> Any:
        """The first batch, which stays the first one."""
        first = self._next()
        if first is None:
            raise ValueError("data must give at least one batch, got an iterator without any")
        self._waiting.append(first)
        return first

    def pass_over(self, count: int) -> None:
        """Goes on behind the first ``count`` batches, which an earlier run has used."""
        if callable(self._data):
            self._iterator, self._waiting = self._open(self._step + count), []
            return
        for _ in range(count):
            if self._next() is None:
                return

    def take(self, most: int) -> tuple[Any, int]:
        """At most ``most`` batches of one shape, stacked, and their number; 0 at the end.

        The stack always has the same length, so that nothing is compiled anew: it is filled up with
        copies of its last batch.
        """
        batches: list = []
        while len(batches) < most:
            batch = self._next()
            if batch is None:
                break
            if batches and _signature(batch) != _signature(batches[0]):
                self._waiting.append(batch)
                break
            batches.append(batch)
            if len(batches) == 1:
                elements = sum(leaf.size for leaf in jax.tree.leaves(batch))
                capacity = max(1, min(_BATCHES_A_CALL, _ELEMENTS_A_CALL // max(elements, 1)))
                most = min(most, capacity)
        if not batches:
            return None, 0
        padded = batches + [batches[-1]] * (capacity - len(batches))
        return jax.tree.map(lambda *leaves: np.stack(leaves), *padded), len(batches)

    def _next(self):
        if self._waiting:
            return self._waiting.pop()
        batch = next(self._iterator, None)
        return None if batch is None else jax.tree.map(np.asarray, batch)


def _epochs(data: Iterable) -> Iterator:
    while True:
        empty = True
        for batch in data:
            empty = False
            yield batch
        if empty:
            return


def _signature(batch):
    leaves, structure = jax.tree.flatten(batch)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]
