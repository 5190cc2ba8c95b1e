"""The loop: many steps in a few compiled calls, with minibatches, history and a progress bar."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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


def run(
    rng_key: jax.Array,
    sampler: SamplingAlgorithm,
    state: SVGDState,
    num_steps: int,
    *,
    data: Any = None,
    batch_size: int | None = None,
    progress: bool = False,
    callback: Callable[[int, SVGDState, SVGDInfo], Any] | None = None,
    every: int = 1,
    keep_particles: bool = False,
) -> tuple[SVGDState, History]:
    """Makes ``num_steps`` steps.

    Randomness depends on ``rng_key`` and the number of steps already in ``state`` alone, so 50 steps
    and another 50 with the same key end bitwise where 100 steps do. The steps are compiled once for a
    sampler and the shapes of its state and data; more steps, other seeds or another ``every`` compile
    nothing new.

    Args:
      rng_key: of ``jax.random.key``; gives each step its own key, and the order of the minibatches.
      sampler: as from ``jsvgd.svgd``.
      state: as from ``sampler.init``; never changed in place.
      num_steps: steps to make.
      data: pytree of arrays with one leading axis of rows; a batch of it is passed to the log density
        as ``logdensity_fn(position, batch)``. Scaling the likelihood by rows over batch size is the
        business of the log density.
      batch_size: rows of a minibatch, drawn without replacement in an order shuffled anew each epoch
        (an incomplete last batch is left out of the epoch); None passes all rows to every step.
      progress: shows a bar with the bandwidth and the direction's norm.
      callback: ``callback(step, state, info)`` every ``every`` steps; a true result ends the run.
      every: steps between two records of history.
      keep_particles: keeps the particles in the history too.

    Returns:
      The state after the last step and the ``History``.

    Raises:
      ValueError: for sizes out of range and data whose leaves disagree in their rows.

    Example:
      >>> import jax, optax, jsvgd
      >>> sampler = jsvgd.svgd(lambda x: -0.5 * (x @ x), optax.adam(0.1))
      >>> state = sampler.init(jax.random.normal(jax.random.key(0), (50, 2)) + 5)
      >>> state, history = jsvgd.run(jax.random.key(1), sampler, state, 200, every=20)
      >>> history.step.shape
      (10,)
    """
    num_steps = _at_least("num_steps", num_steps, 0)
    every = _at_least("every", every, 1)
    rows = None if data is None else _count_rows(data)
    if batch_size is not None:
        batch_size = _at_least("batch_size", batch_size, 1)
        if rows is None:
            raise ValueError(
                f"batch_size={batch_size} needs data to take batches from, got data=None"
            )
        if batch_size > rows:
            raise ValueError(
                f"batch_size must be at most the {rows} rows of data, got {batch_size}"
            )
    if batch_size == rows:
        batch_size = None

    start = int(state.step)
    records_a_call = _records_a_call(state, callback, keep_particles)
    made, parts = 0, []
    with _progress_bar(progress, num_steps) as bar:
        while made < num_steps or not parts:
            steps = min(num_steps - made, records_a_call * every)
            state, history = _steps(
                sampler,
                batch_size,
                records_a_call,
                keep_particles,
                rng_key,
                state,
                data,
                jnp.int32(steps),
                jnp.int32(every),
            )
            made += steps
            filled = -(-steps // every)
            parts.append(jax.tree.map(lambda a, filled=filled: a[:filled], history))
            if steps == 0:
                break
            last = jax.tree.map(lambda a: a[-1], parts[-1].info)
            if progress:
                bar.update(steps)
                bar.set_postfix(_shown(last), refresh=False)
            if callback is not None and callback(start + made, state, last):
                break
    return state, jax.tree.map(lambda *a: jnp.concatenate(a), *parts)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _steps(
    sampler, batch_size, max_records, keep_particles, rng_key, state, data, num_steps, every
):
    """``num_steps`` steps and a buffer of records, of which the first ceil(num_steps / every) count."""
    step_key, order_key = jax.random.split(rng_key)
    if batch_size is not None:
        rows = _count_rows(data)
        batches_an_epoch = rows // batch_size

    def order(step):
        if batch_size is None:
            return jnp.zeros((), jnp.int32)
        epoch_key = jax.random.fold_in(order_key, step // batches_an_epoch)
        return jax.random.permutation(epoch_key, rows)

    def batch_of(step, permutation):
        position = step % batches_an_epoch
        index = jax.lax.dynamic_slice_in_dim(permutation, position * batch_size, batch_size)
        return jax.tree.map(lambda a: a[index], data)

    def one_step(_, carry):
        state, permutation, _ = carry
        step = state.step
        args = () if data is None else (data,)
        if batch_size is not None:
            permutation = jax.lax.cond(
                step % batches_an_epoch == 0, order, lambda _: permutation, step
            )
            args = (batch_of(step, permutation),)
        state, info = sampler.step(jax.random.fold_in(step_key, step), state, *args)
        return state, permutation, info

    def entry_of(carry):
        state, _, info = carry
        return History(state.step, info, state.particles if keep_particles else None)

    def record(r, carry_and_history):
        carry, history = carry_and_history
        count = jnp.minimum(every, num_steps - r * every)
        carry = jax.lax.fori_loop(0, count, one_step, carry)
        return carry, jax.tree.map(lambda b, a: b.at[r].set(a), history, entry_of(carry))

    carry = (state, order(state.step), None)
    info = _zeros(jax.eval_shape(lambda: one_step(0, carry)[2]))
    carry = (state, order(state.step), info)
    entry = jax.eval_shape(lambda: entry_of(carry))
    history = jax.tree.map(lambda a: jnp.zeros((max_records, *a.shape), a.dtype), entry)
    num_records = (num_steps + every - 1) // every
    (state, _, _), history = jax.lax.fori_loop(0, num_records, record, (carry, history))
    return state, history


def _zeros(shapes):
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)


def _records_a_call(state, callback, keep_particles) -> int:
    if callback is not None:
        return 1  # the callback wants the state of every record
    if not keep_particles:
        return _RECORDS_A_CALL
    size = sum(leaf.size for leaf in jax.tree.leaves(state.particles))
    return max(1, min(_RECORDS_A_CALL, _HISTORY_ELEMENTS_A_CALL // size))


def _at_least(name: str, value: int, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def _count_rows(data) -> int:
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


def _progress_bar(shown: bool, num_steps: int):
    if not shown:
        return contextlib.nullcontext()
    from tqdm.auto import tqdm  # a bar is asked for rarely, and importing it takes time

    return tqdm(total=num_steps, unit="step")


def _shown(info: SVGDInfo) -> dict[str, str]:
    bandwidth = float(jnp.mean(info.bandwidth))
    shown = {"bandwidth": f"{bandwidth:.3g}", "direction": f"{float(info.direction_norm):.3g}"}
    lost = int(info.num_nonfinite)
    return {**shown, "non-finite": str(lost)} if lost else shown
