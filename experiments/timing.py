"""Time and memory of a function on arrays, as the benchmarks report them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
from jax import lax

__all__ = ["compiled_with_memory", "seconds_a_call", "seconds_a_step"]

# Steps in a loop whose length XLA knows: after every turn of any other, the host waits for the device.
STEPS = 16


# A call that takes longer hides the host's dispatch of the next one.
LONG = 3e-4


def seconds_a_call(function: Callable, x, *rest, seconds: float = 0.1, repeats: int = 3) -> float:
    """Median seconds of ``function(x, *rest)``.

    Long calls are dispatched one after another. Short ones run inside one compiled loop, in which one number
    of x moves a little, by a number of the last result, so that no call can be left out or taken out of
    the loop.

    Args:
      function: its result is an array or a pytree of arrays.
      x: array.
      seconds: about how long one repeat may take.
    """
    compiled = jax.jit(function).lower(x, *rest).compile()

    def run(count):
        start = time.perf_counter()
        for _ in range(count):
            result = compiled(x, *rest)
        jax.block_until_ready(result)
        return time.perf_counter() - start

    run(2)
    once = run(3) / 3
    if once > LONG:
        count = max(3, int(seconds / once))
        return statistics.median(run(count) for _ in range(repeats)) / count

    def step(state):
        x, rest = state
        result = lax.optimization_barrier(function(x, *rest))
        moved = sum(leaf.ravel()[0] for leaf in jax.tree.leaves(result))
        return x.at[(0,) * x.ndim].add((1e-6 * moved).astype(x.dtype)), rest

    return seconds_a_step(step, (x, rest), seconds=seconds, repeats=repeats)


def seconds_a_step(step: Callable, state, *, seconds: float = 0.1, repeats: int = 3) -> float:
    """Median seconds of ``state = step(state)`` inside one compiled loop.

    Args:
      seconds: about how long one repeat may take.
    """

    @jax.jit
    def loop(turns, state):
        def turn(_, state):
            return lax.fori_loop(0, STEPS, lambda _, state: step(state), state)

        return lax.fori_loop(0, turns, turn, state)

    def run(turns):
        start = time.perf_counter()
        jax.block_until_ready(loop(turns, state))
        return time.perf_counter() - start

    run(1)
    turns = max(1, min(200, int(seconds / max(run(1), 1e-6))))
    return statistics.median(run(turns) for _ in range(repeats)) / (turns * STEPS)


def compiled_with_memory(function: Callable, *arrays):
    """The compiled function and the bytes it holds at once: arguments, results and scratch."""
    compiled = jax.jit(function).lower(*arrays).compile()
    analysis = compiled.memory_analysis()
    parts = ("argument", "output", "temp")
    return compiled, sum(getattr(analysis, f"{part}_size_in_bytes") for part in parts)
