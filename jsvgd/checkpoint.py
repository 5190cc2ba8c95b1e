"""Checkpoints of ``jsvgd.run`` with Orbax: saved atomically, checked before anything is restored.

Beside the arrays a checkpoint holds what the run is: its key, a digest of the state it began with, its
data, batch size and history. All of it has to be the same where a run goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jsvgd
from jsvgd.arguments import at_least
from jsvgd.identity import abstract, described, differences_of, identity, named, others, packed
from jsvgd.loop import History, Reached
from jsvgd.sampler import SVGDState

__all__ = ["FORMAT", "Checkpoint", "open_store"]

# Of the files; one that this code cannot read has another number.
FORMAT = 2


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
            at_least(name, getattr(self, name), 1)


@contextlib.contextmanager
def open_store(
    checkpoint: Any,
    rng_key: jax.Array,
    state: SVGDState,
    *,
    data: Any,
    batch_size: int | None,
    every: int,
) -> Iterator[_Store]:
    """The store of a run that begins at ``state``.

    Args:
      checkpoint: a folder or a ``Checkpoint``.
      rng_key, state: of the run.
      data: its arrays; None where there are none or they come from an iterator.
      batch_size, every: of the run.

    Raises:
      ImportError: where Orbax is not installed.
      TypeError: where ``checkpoint`` is neither a folder nor a ``Checkpoint``.
      OSError: where the folder cannot be used.
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
        if os.path.exists(directory) and not os.path.isdir(directory):
            raise NotADirectoryError(f"checkpoint must be a folder, got the file {directory}")
    run = identity(rng_key, state, data=data, batch_size=batch_size, every=every)
    try:
        manager = ocp.CheckpointManager(directory, options=options)
    except (OSError, ValueError) as error:
        raise OSError(f"the checkpoint folder {directory} cannot be used: {error}") from error
    with manager:
        yield _Store(ocp, manager, directory, checkpoint.every, run)


class _Store:
    """Saves and restores how far one run has come."""

    def __init__(self, ocp, manager, directory, every, run):
        self.every = every
        self._ocp, self._manager, self._directory = ocp, manager, directory
        self._run = run
        self._saved = None  # the step of the last checkpoint, or of the last attempt at one

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
        about = self._read(step, "about", ocp.args.JsonRestore())
        self._refuse_others(
            about, described(named("state", fresh.state)), described(named("record", entry))
        )
        arrays = self._read(step, "arrays", ocp.args.StandardRestore())

        def tree_like(name, template, length=None):
            leaves = []
            for path, leaf in named(name, template).items():
                shape = leaf.shape if length is None else (length, *leaf.shape)
                leaves.append(_unpacked(arrays.get(path, np.zeros(shape, _dtype(leaf))), leaf))
            return jax.tree.unflatten(jax.tree.structure(template), leaves)

        records = [tree_like("record", entry, about["records"])] if about["records"] else []
        partial = tree_like("partial", entry, 1) if about["partial"] else None
        self._saved = step
        return Reached(tree_like("state", fresh.state), records, partial, about["stopped"])

    def _read(self, step, item, args):
        # Whatever Orbax says of files that are missing, broken or not its own: it does not say which.
        try:
            return self._manager.restore(step, args=self._ocp.args.Composite(**{item: args}))[item]
        except Exception as error:
            raise ValueError(
                f"the checkpoint of step {step} in {self._directory} cannot be read: expected its "
                f"{item} as jsvgd.run writes them, got {type(error).__name__}: {error}"
            ) from error

    def save_if_due(self, reached: Reached) -> None:
        """Saves where ``every`` steps have been made since the last checkpoint."""
        last = self._run["start"] if self._saved is None else self._saved
        if int(reached.state.step) - last >= self.every:
            self.save(reached)

    def save(self, reached: Reached) -> None:
        """Saves, unless nothing has happened since the last checkpoint.

        Ctrl-C waits until the files are there: half a save is no checkpoint, and Orbax refuses to
        save one step twice.

        Raises:
          OSError: where the files cannot be written; they are not tried again at the same step.
        """
        step = int(reached.state.step)
        if step == self._saved:
            return
        with _interrupts_held():
            self._saved = step
            try:
                self._write(step, reached)
            except Exception as error:
                raise OSError(
                    f"the checkpoint of step {step} in {self._directory} cannot be written: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def _write(self, step: int, reached: Reached) -> None:
        ocp = self._ocp
        arrays = named("state", reached.state)
        entry: dict = {}
        if reached.records:
            joined = jax.tree.map(lambda *a: jnp.concatenate(a), *reached.records)
            reached = reached._replace(records=[joined])
            arrays |= named("record", joined)
            entry = described(named("record", jax.tree.map(lambda a: a[0], joined)))
        if reached.partial is not None:
            arrays |= named("partial", reached.partial)
            one = jax.tree.map(lambda a: a[0], reached.partial)
            entry = described(named("record", one))
        about = {
            "format": FORMAT,
            "jsvgd": jsvgd.__version__,
            **self._run,
            "state": described(named("state", reached.state)),
            "record": entry,
            "records": len(reached.records[0].step) if reached.records else 0,
            "partial": reached.partial is not None,
            "stopped": reached.stopped,
        }
        # Orbax writes to a temporary folder and renames it: a checkpoint is whole or not there.
        # It takes no empty arrays; those come back from their shapes.
        filled = {path: packed(leaf) for path, leaf in arrays.items() if np.size(leaf)}
        items = ocp.args.Composite(
            arrays=ocp.args.StandardSave(filled), about=ocp.args.JsonSave(about)
        )
        self._manager.save(step, args=items, force=True)

    def _refuse_others(self, about: dict, state: dict, record: dict) -> None:
        where = f"the checkpoint in {self._directory}"
        if about.get("format") != FORMAT:
            raise ValueError(
                f"{where} has format {about.get('format')}, this version of jsvgd reads {FORMAT}"
            )
        differences = differences_of(about["state"], state)
        if about["record"]:
            differences += differences_of(about["record"], record)
        differences += others(about, self._run, of_other_shapes=bool(differences))
        if differences:
            raise ValueError(
                f"{where} is of another run: {'; '.join(differences)}. Give this run a folder of its own"
            )


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keeps Ctrl-C until the block is done, then lets it through."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield  # Python raises KeyboardInterrupt in the main thread alone
        return
    held = []
    signal.signal(signal.SIGINT, lambda *_: held.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


def _dtype(leaf):
    dtype = abstract(leaf).dtype
    return np.uint32 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtype


def _unpacked(array, like):
    if jnp.issubdtype(abstract(like).dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            jnp.asarray(np.asarray(array)), impl=jax.random.key_impl(like)
        )
    # Through NumPy: Orbax's arrays are tied to a device, for which the steps would compile anew.
    return jnp.asarray(np.asarray(array))
