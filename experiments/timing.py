"""Time and memory of a function on arrays, as the benchmarks report them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
from jax import lax

__all__ = [
    "Prepared",
    "compiled_loop",
    "compiled_with_memory",
    "prepare",
    "seconds_a_call",
    "seconds_of_calls",
    "seconds_of_loop",
]

# Steps in a loop whose length XLA knows: after every turn of any other, the host waits for the device.
STEPS = 16

# A call that takes longer hides the host's dispatch of the next one.
LONG = 3e-4


@dataclasses.dataclass
class Prepared:
    """A function compiled for its arguments, to be called and timed.

    Attributes:
      compiled: the function for these arguments.
      arguments: arrays.
      bytes: what it holds at once: arguments, results and scratch.
      step: state -> state, one call whose arguments depend on the last one's result.
      loop: many steps, compiled; None until it is needed.
    """

    compiled: Callable
    arguments: tuple
    bytes: int
    step: Callable
    loop: Callable | None = None

    def __call__(self):
        return self.compiled(*self.arguments)

    def seconds(self, seconds: float = 0.1, repeats: int = 3) -> float:
        """Median seconds a call, of ``repeats`` measurements of about ``seconds`` each.

        Long calls are dispatched one after another. Short ones run inside one compiled loop, in which one
        number of the first argument moves a little, by a number of the last result, so that no call can be
        left out or taken out of the loop.
        """

        def run(count):
            start = time.perf_counter()
            for _ in range(count):
                result = self()
            jax.block_until_ready(result)
            return time.perf_counter() - start

        run(2)
        once = min(run(1) for _ in range(5))
        if once <= LONG:
            self.loop = self.loop or compiled_loop(self.step, self.arguments)
            return seconds_of_loop(self.loop, self.arguments, seconds, repeats)
        count = max(3, int(seconds / once))
        return statistics.median(run(count) for _ in range(repeats)) / count


def prepare(function: Callable, x, *rest, short: bool = False) -> Prepared:
    """Compiles function(x, *rest) for timing; where it is known to be short, the loop as well.

    Args:
      function: its result is an array or a pytree of arrays.
      x: array.
    """

    def step(arguments):
        x, *rest = arguments
        result = lax.optimization_barrier(function(x, *rest))
        moved = sum(leaf.ravel()[0] for leaf in jax.tree.leaves(result))
        return x.at[(0,) * x.ndim].add((1e-6 * moved).astype(x.dtype)), *rest

    compiled, size = compiled_with_memory(function, x, *rest)
    arguments = (x, *rest)
    loop = compiled_loop(step, arguments) if short else None
    return Prepared(compiled, arguments, size, step, loop)


def seconds_a_call(function: Callable, x, *rest, **options) -> float:
    """Median seconds of ``function(x, *rest)``; ``prepare`` and ``Prepared.seconds`` in one."""
    return prepare(function, x, *rest).seconds(**options)


def compiled_loop(step: Callable, state) -> Callable:
    """(turns, state) -> state after turns * STEPS steps."""

    def loop(turns, state):
        def turn(_, state):
            return lax.fori_loop(0, STEPS, lambda _, state: step(state), state)

        return lax.fori_loop(0, turns, turn, state)

    return jax.jit(loop).lower(1, state).compile()


def seconds_of_loop(loop: Callable, state, seconds: float = 0.1, repeats: int = 3) -> float:
    """Median seconds a step."""

    def run(turns):
        start = time.perf_counter()
        jax.block_until_ready(loop(turns, state))
        return time.perf_counter() - start

    run(1)
    turns = max(1, min(200, int(seconds / max(run(1), 1e-6))))
    return statistics.median(run(turns) for _ in range(repeats)) / (turns * STEPS)


def seconds_of_calls(step: Callable, state, seconds: float = 0.1, repeats: int = 3) -> float:
    """Median seconds a step, one call of a jitted step after another, as in a loop in Python."""

    def run(calls):
        start, reached = time.perf_counter(), state
        for _ in range(calls):
            reached = step(reached)
        jax.block_until_ready(reached)
        return time.perf_counter() - start

    run(3)
    calls = max(3, min(200, int(seconds / run(1))))
    return statistics.median(run(calls) for _ in range(repeats)) / calls


def compiled_with_memory(function: Callable, *arrays):
    """The compiled function and the bytes it holds at once: arguments, results and scratch."""
    compiled = jax.jit(function).lower(*arrays).compile()
    analysis = compiled.memory_analysis()
    parts = ("argument", "output", "temp")
    return compiled, sum(getattr(analysis, f"{part}_size_in_bytes") for part in parts)
