"""The loop: many steps in a few compiled calls, with minibatches, history, a bar and checkpoints."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jsvgd.arguments import at_least
from jsvgd.batches import STREAM, Stream, batch_chooser
from jsvgd.progress import progress_bar
from jsvgd.run_checks import as_callbacks, batch_choice, check_key, check_sampler, steps_made
from jsvgd.sampler import SamplingAlgorithm, SVGDInfo, SVGDState

__all__ = ["History", "run"]

# Records of history that one compiled call makes, and the numbers of particle history it may hold.
_RECORDS_A_CALL = 64
_HISTORY_ELEMENTS_A_CALL = 1 << 24


class History(NamedTuple):
    """Records of a run, one every ``every`` steps and one of the last step.

    Attributes:
      step: steps made by then, (R,) int32.
      info: ``SVGDInfo`` of those steps, leaves (R, ...).
      particles: particles after those steps, leaves (R, N, ...); None unless asked for.
    """

    step: jax.Array
    info: SVGDInfo
    particles: Any


class Reached(NamedTuple):
    """How far a run has come; all that it takes to go on.

    Attributes:
      state: of the sampler.
      records: whole records of history, a list of ``History``.
      partial: a record of the last step where that is between two whole records, else None.
      stopped: whether a callback has ended the run.
    """

    state: SVGDState
    records: list[History]
    partial: History | None
    stopped: bool


def run(
    rng_key: jax.Array,
    sampler: SamplingAlgorithm,
    state: SVGDState,
    num_steps: int,
    *,
    data: Any = None,
    batch_size: int | None = None,
    progress: bool = False,
    callback: Callable | Sequence[Callable] | None = None,
    every: int = 1,
    keep_particles: bool = False,
    checkpoint: Any = None,
) -> tuple[SVGDState, History]:
    """Makes ``num_steps`` steps.

    Randomness depends on ``rng_key`` and the number of steps already in ``state`` alone, so 50 steps
    and another 50 with the same key end bitwise where 100 steps do: with arrays, with a function of the
    step, and with one iterator, which goes on where it stands. Not with an iterable such as a data
    loader: each call of ``run`` begins it anew, and the second 50 steps see the first 50 batches again.
    (A run resumed from its checkpoint passes over the batches it has seen.) The steps are compiled once
    for a sampler and the shapes of its state and data; more steps, other seeds or another ``every``
    compile nothing new.

    Args:
      rng_key: of ``jax.random.key``; gives each step its own key, and the order of the minibatches.
      sampler: as from ``jsvgd.svgd``.
      state: as from ``sampler.init``; never changed in place.
      num_steps: steps to make.
      data: pytree of arrays with one leading axis of rows; a batch of it is passed to the log density
        as ``logdensity_fn(position, batch)``. Scaling the likelihood by rows over batch size is the
        business of the log density. Or batches one by one: an iterator (the run ends where it does,
        with a warning), an iterable such as a data loader (begun anew where it ends), or a function
        that takes the number of the next step and returns the iterator of the batches from there on:
        what makes a loader go on over several calls. Batches of another
        shape, such as the last one of an epoch, compile the steps once more.
      batch_size: rows of a minibatch, drawn without replacement in an order shuffled anew each epoch
        (an incomplete last batch is left out of the epoch); None passes all rows to every step.
      progress: shows a bar with the log density, the bandwidth, the spread of the particles (root
        mean square of their standard deviations), the direction's norm and steps per second.
      callback: ``callback(step, state, info)`` every ``every`` steps, or several; a true result ends
        the run. See ``jsvgd.StopOnMovement`` and ``jsvgd.StopOnKSD``.
      every: steps between two records of history.
      keep_particles: keeps the particles in the history too.
      checkpoint: a folder, or a ``jsvgd.Checkpoint``. The run is saved there every so many steps, at
        its end and at Ctrl-C (which waits for a save that has begun); the same call goes on from
        there, and ends bitwise where an unbroken run does, its history included.

    Returns:
      The state after the last step and the ``History``.

    Raises:
      ValueError: for sizes out of range, data whose leaves disagree in their rows, and a checkpoint of
        another run: another key, first state, data, batch size, ``every`` or history.
      TypeError: for a key, sampler, state or callback that is none.
      OSError: where a checkpoint cannot be written.
      ImportError: where a checkpoint is asked for and Orbax is not installed.

    Example:
      >>> import jax, optax, jsvgd
      >>> sampler = jsvgd.svgd(lambda x: -0.5 * (x @ x), optax.adam(0.1))
      >>> state = sampler.init(jax.random.normal(jax.random.key(0), (50, 2)) + 5)
      >>> state, history = jsvgd.run(jax.random.key(1), sampler, state, 200, every=20)
      >>> history.step.shape
      (10,)
    """
    check_key("rng_key", rng_key)
    check_sampler(sampler)
    num_steps = at_least("num_steps", num_steps, 0)
    every = at_least("every", every, 1)
    choice = batch_choice(data, batch_size)
    callbacks = as_callbacks(callback)
    start = steps_made(state)
    stream = Stream(data, start) if choice == STREAM else None
    reached = Reached(state, [], None, False)
    with contextlib.ExitStack() as stack:
        store = None
        if checkpoint is not None:
            from jsvgd.checkpoint import open_store  # builds on this module

            store = stack.enter_context(
                open_store(
                    checkpoint,
                    rng_key,
                    state,
                    data=None if stream is not None else data,
                    batch_size=batch_size,
                    every=every,
                )
            )
            if store.has_something:
                batch = data if stream is None else stream.example()
                entry = _entry(sampler, state, keep_particles, choice, batch)
                reached = store.restore(reached, entry)
        made = int(reached.state.step) - start
        if made > num_steps:
            raise ValueError(
                f"num_steps must be at least the {made} steps that the checkpoint has made, "
                f"got {num_steps}"
            )
        if stream is not None and made:
            stream.pass_over(made)
        show = stack.enter_context(progress_bar(progress, num_steps, made))
        steps = functools.partial(
            _steps,
            sampler,
            choice,
            1 if callbacks else _records_a_call(state, keep_particles),
            keep_particles,
            rng_key,
        )
        longest = num_steps if store is None else store.every
        batches = data if stream is None else stream
        try:
            chunks = _chunks(steps, reached, start, num_steps, every, longest, batches)
            for reached in chunks:
                made = int(reached.state.step) - start
                info = _last_record(reached).info
                show(made, info, reached.state)
                if reached.partial is None or made == num_steps:
                    wishes = [wish(start + made, reached.state, info) for wish in callbacks]
                    if any(wishes):
                        reached = reached._replace(stopped=True)
                        break
                if store is not None:
                    store.save_if_due(reached)
            if store is not None:
                store.save(reached)
        except BaseException as error:  # Ctrl-C, or an error of a callback, an iterator, the disk
            if store is not None:
                try:
                    store.save(reached)
                except OSError as failure:
                    error.add_note(str(failure))
            raise
    if not reached.records and reached.partial is None:
        batch = data if stream is None else stream.example()
        entry = _entry(sampler, state, keep_particles, choice, batch)
        return reached.state, jax.tree.map(lambda a: jnp.zeros((0, *a.shape), a.dtype), entry)
    parts = reached.records + ([] if reached.partial is None else [reached.partial])
    return reached.state, jax.tree.map(lambda *a: jnp.concatenate(a), *parts)


def _chunks(steps, reached, start, num_steps, every, longest, batches):
    """What is reached after each compiled call of at most ``longest`` steps."""
    while not reached.stopped:
        made = int(reached.state.step) - start
        left = min(num_steps - made, longest)
        if left <= 0:
            return
        offset = made % every
        most = steps.args[2] * every - offset  # the records that a call can hold
        count = min(left, most)
        if isinstance(batches, Stream):
            data, count = batches.take(count)
            if count == 0:
                warnings.warn(
                    f"the iterator of batches ended after {made} of {num_steps} steps", stacklevel=3
                )
                return
        else:
            data = batches
        numbers = (jnp.int32(count), jnp.int32(every), jnp.int32(offset))
        state, history = steps(reached.state, data, *numbers)
        whole, rest = divmod(offset + count, every)
        records = jax.tree.map(lambda a, whole=whole: a[:whole], history)
        partial = jax.tree.map(lambda a, whole=whole: a[whole : whole + 1], history)
        reached = Reached(
            state,
            reached.records + ([records] if whole else []),
            partial if rest else None,
            False,
        )
        yield reached


def _last_record(reached: Reached) -> History:
    if reached.partial is not None:
        return jax.tree.map(lambda a: a[0], reached.partial)
    return jax.tree.map(lambda a: a[-1], reached.records[-1])


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _steps(
    sampler, choice, max_records, keep_particles, rng_key, state, data, num_steps, every, offset
):
    """``num_steps`` steps, the first of them ``offset`` steps after the last whole record.

    Returns the state and a buffer of records, of which the first ceil((offset + num_steps) / every)
    count.
    """
    step_key, order_key = jax.random.split(rng_key)
    order_at, choose = batch_chooser(choice, order_key, data, state.step)

    def one_step(_, carry):
        state, order, _ = carry
        step = state.step
        args, order = choose(step, order)
        state, info = sampler.step(jax.random.fold_in(step_key, step), state, *args)
        return state, order, info

    def record(r, carry_and_history):
        carry, history = carry_and_history
        first = jnp.maximum(r * every - offset, 0)
        last = jnp.minimum((r + 1) * every - offset, num_steps)
        carry = jax.lax.fori_loop(0, last - first, one_step, carry)
        state, _, info = carry
        entry = History(state.step, info, state.particles if keep_particles else None)
        return carry, jax.tree.map(lambda b, a: b.at[r].set(a), history, entry)

    carry = (state, order_at(state.step), None)
    end, _, info = jax.eval_shape(lambda: one_step(0, carry))
    entry = History(end.step, info, end.particles if keep_particles else None)
    history = jax.tree.map(lambda a: jnp.zeros((max_records, *a.shape), a.dtype), entry)
    info = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), info)
    carry = (state, order_at(state.step), info)
    num_records = (offset + num_steps + every - 1) // every
    (state, _, _), history = jax.lax.fori_loop(0, num_records, record, (carry, history))
    return state, history


def _entry(sampler, state, keep_particles, choice, batch) -> History:
    """Shapes and dtypes of one record."""

    def one(state, batch):
        args = () if choice is None else (batch,)
        state, info = sampler.step(jax.random.key(0), state, *args)
        return History(state.step, info, state.particles if keep_particles else None)

    if isinstance(choice, int):
        batch = jax.tree.map(lambda a: jnp.asarray(a)[:choice], batch)
    return jax.eval_shape(one, state, batch)


def _records_a_call(state, keep_particles) -> int:
    if not keep_particles:
        return _RECORDS_A_CALL
    size = sum(leaf.size for leaf in jax.tree.leaves(state.particles))
    return max(1, min(_RECORDS_A_CALL, _HISTORY_ELEMENTS_A_CALL // size))
