"""Checkpoints of ``jsvgd.run`` with Orbax: saved atomically, checked before anything is restored."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jsvgd
from jsvgd.loop import History, Reached
from jsvgd.sampler import SVGDState

__all__ = ["FORMAT", "Checkpoint", "open_store"]

# Of the files; one that this code cannot read has another number.
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Where and how often ``jsvgd.run`` saves.

    Attributes:
      directory: a folder of this run alone; made where it does not exist.
      every: steps between two checkpoints.
      keep: how many of the last ones are kept.
    """

    directory: str | os.PathLike
    every: int = 1000
    keep: int = 2

    def __post_init__(self):
        for name in ("every", "keep"):
            value = getattr(self, name)
            try:
                number = operator.index(value)
            except TypeError:
                raise TypeError(f"{name} must be a whole number, got {value!r}") from None
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")


@contextlib.contextmanager
def open_store(checkpoint: Any, rng_key: jax.Array, state: SVGDState) -> Iterator[_Store]:
    """The store of a run that begins at ``state``.

    Raises:
      ImportError: where Orbax is not installed.
      TypeError: where ``checkpoint`` is neither a folder nor a ``Checkpoint``.
    """
    if not isinstance(checkpoint, Checkpoint):
        if not isinstance(checkpoint, (str, os.PathLike)):
            raise TypeError(
                f"checkpoint must be a folder or a jsvgd.Checkpoint, got {type(checkpoint).__name__}"
            )
        checkpoint = Checkpoint(checkpoint)
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            f"checkpoints need Orbax: pip install 'jsvgd[checkpoint]' ({error})"
        ) from error
    options = ocp.CheckpointManagerOptions(
        max_to_keep=checkpoint.keep, enable_async_checkpointing=False
    )
    directory = os.fspath(checkpoint.directory)
    if "://" not in directory:  # a bucket
        directory = os.path.abspath(directory)
    with ocp.CheckpointManager(directory, options=options) as manager:
        yield _Store(ocp, manager, directory, checkpoint.every, rng_key, state)


class _Store:
    """Saves and restores how far one run has come."""

    def __init__(self, ocp, manager, directory, every, rng_key, state):
        self.every = every
        self._ocp, self._manager, self._directory = ocp, manager, directory
        self._start = int(state.step)
        self._key = _key_description(rng_key)
        self._saved = None

    @property
    def has_something(self) -> bool:
        """Whether there is a checkpoint."""
        return self._manager.latest_step() is not None

    def restore(self, fresh: Reached, entry: History) -> Reached:
        """The last checkpoint.

        Args:
          fresh: as the run would begin without one; gives structure, shapes and dtypes.
          entry: shapes and dtypes of a record of its history.

        Raises:
          ValueError: where the checkpoint is of another format or another run; it says what differs.
        """
        ocp, step = self._ocp, self._manager.latest_step()
        found = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))
        about = found["about"]
        self._refuse_others(
            about, _described(_named("state", fresh.state)), _described(_named("record", entry))
        )
        arrays = self._manager.restore(
            step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore())
        )["arrays"]

        def tree_like(name, template, length=None):
            leaves = []
            for path, leaf in _named(name, template).items():
                shape = leaf.shape if length is None else (length, *leaf.shape)
                leaves.append(_unpacked(arrays.get(path, np.zeros(shape, _dtype(leaf))), leaf))
            return jax.tree.unflatten(jax.tree.structure(template), leaves)

        records = [tree_like("record", entry, about["records"])] if about["records"] else []
        partial = tree_like("partial", entry, 1) if about["partial"] else None
        self._saved = step
        return Reached(tree_like("state", fresh.state), records, partial, about["stopped"])

    def save_if_due(self, reached: Reached) -> None:
        """Saves where ``every`` steps have been made since the last checkpoint."""
        last = self._start if self._saved is None else self._saved
        if int(reached.state.step) - last >= self.every:
            self.save(reached)

    def save(self, reached: Reached) -> None:
        """Saves, unless nothing has happened since the last checkpoint."""
        ocp, step = self._ocp, int(reached.state.step)
        if step == self._saved:
            return
        arrays = _named("state", reached.state)
        entry: dict = {}
        if reached.records:
            joined = jax.tree.map(lambda *a: jnp.concatenate(a), *reached.records)
            reached = reached._replace(records=[joined])
            arrays |= _named("record", joined)
            entry = _described(_named("record", jax.tree.map(lambda a: a[0], joined)))
        if reached.partial is not None:
            arrays |= _named("partial", reached.partial)
            one = jax.tree.map(lambda a: a[0], reached.partial)
            entry = _described(_named("record", one))
        about = {
            "format": FORMAT,
            "jsvgd": jsvgd.__version__,
            "start": self._start,
            "rng_key": self._key,
            "state": _described(_named("state", reached.state)),
            "record": entry,
            "records": len(reached.records[0].step) if reached.records else 0,
            "partial": reached.partial is not None,
            "stopped": reached.stopped,
        }
        # Orbax writes to a temporary folder and renames it: a checkpoint is whole or not there.
        # It takes no empty arrays; those come back from their shapes.
        packed = {path: _packed(leaf) for path, leaf in arrays.items() if np.size(leaf)}
        items = ocp.args.Composite(
            arrays=ocp.args.StandardSave(packed), about=ocp.args.JsonSave(about)
        )
        self._manager.save(step, args=items, force=True)
        self._saved = step

    def _refuse_others(self, about: dict, state: dict, record: dict) -> None:
        where = f"the checkpoint in {self._directory}"
        if about.get("format") != FORMAT:
            raise ValueError(
                f"{where} has format {about.get('format')}, this version of jsvgd reads {FORMAT}"
            )
        differences = _differences(about["state"], state)
        if about["record"]:
            differences += _differences(about["record"], record)
        if about["rng_key"] != self._key:
            differences.append(f"rng_key is {about['rng_key']} there and {self._key} here")
        if about["start"] != self._start:
            differences.append(
                f"the run began at step {about['start']} there and at {self._start} here"
            )
        if differences:
            raise ValueError(
                f"{where} is of another run: {'; '.join(differences)}. Give this run a folder of its own"
            )


def _named(name: str, tree: Any) -> dict[str, Any]:
    """The leaves by name and path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {name + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _described(leaves: dict[str, Any]) -> dict[str, str]:
    return {
        path: f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in ((path, _abstract(leaf)) for path, leaf in leaves.items())
    }


def _abstract(leaf):
    return leaf if hasattr(leaf, "dtype") and hasattr(leaf, "shape") else np.asarray(leaf)


def _differences(there: dict[str, str], here: dict[str, str], most: int = 5) -> list[str]:
    found = [
        f"{path} is {there.get(path, 'absent')} there and {here.get(path, 'absent')} here"
        for path in {**here, **there}
        if there.get(path) != here.get(path)
    ]
    more = len(found) - most
    return [*found[:most], f"and {more} more"] if more > 0 else found


def _dtype(leaf):
    dtype = _abstract(leaf).dtype
    return np.uint32 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtype


def _packed(leaf):
    if jnp.issubdtype(_abstract(leaf).dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return jnp.asarray(leaf)


def _unpacked(array, like):
    if jnp.issubdtype(_abstract(like).dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            jnp.asarray(np.asarray(array)), impl=jax.random.key_impl(like)
        )
    # Through NumPy: Orbax's arrays are tied to a device, for which the steps would compile anew.
    return jnp.asarray(np.asarray(array))


def _key_description(rng_key: jax.Array) -> str:
    if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key):
        return f"{jax.random.key_impl(rng_key)}{np.asarray(jax.random.key_data(rng_key)).tolist()}"
    return str(np.asarray(rng_key).tolist())
