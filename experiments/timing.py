"""Time and memory of a function on arrays, as the benchmarks report them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
from jax import lax

__all__ = ["compiled_with_memory", "seconds_a_call"]


def seconds_a_call(function: Callable, x, *rest, seconds: float = 0.1, repeats: int = 3) -> float:
    """Median seconds of ``function(x, *rest)`` inside one compiled loop, where x moves a little each time.

    Args:
      function: its result has the structure of x.
      seconds: about how long one repeat may take.
    """

    @jax.jit
    def loop(count, x, rest):
        def once(_, x):
            return jax.tree.map(lambda a, b: a + 1e-6 * b, x, function(x, *rest))

        return lax.fori_loop(0, count, once, x)

    def run(count):
        start = time.perf_counter()
        jax.block_until_ready(loop(count, x, rest))
        return time.perf_counter() - start

    run(1)
    once = run(3) / 3
    count = max(3, min(2000, int(seconds / max(once, 1e-6))))
    return statistics.median(run(count) / count for _ in range(repeats))


def compiled_with_memory(function: Callable, *arrays):
    """The compiled function and the bytes it holds at once: arguments, results and scratch."""
    compiled = jax.jit(function).lower(*arrays).compile()
    analysis = compiled.memory_analysis()
    parts = ("argument", "output", "temp")
    return compiled, sum(getattr(analysis, f"{part}_size_in_bytes") for part in parts)
