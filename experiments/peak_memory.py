"""Peak resident memory of one direction, and of a whole step, above what the import takes.

    python -m experiments.peak_memory [--particles 20000] [--dimension 10]

An N x N array of float32 at the default size is 1.6 GB. Linux and macOS.
"""

from __future__ import annotations

import argparse
import resource
import sys

import jax
import optax

import jsvgd
from experiments.command_line import Parser, integer


def peak() -> float:
    """Peak resident memory of this process so far, MB."""
    unit = 1e6 if sys.platform == "darwin" else 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def main(arguments=None):
    parser = Parser(description=__doc__.splitlines()[0], formatter_class=argparse.HelpFormatter)
    parser.add_argument("--particles", type=integer(1), default=20000)
    parser.add_argument("--dimension", type=integer(1), default=10)
    options = parser.parse_args(arguments)
    x = jax.random.normal(jax.random.key(0), (options.particles, options.dimension))
    start = peak()
    jax.block_until_ready(jsvgd.svgd_direction(x, -x, 2.0))
    direction = peak() - start
    sampler = jsvgd.svgd(lambda p: -0.5 * (p @ p), optax.adam(0.1))
    jax.block_until_ready(jax.jit(sampler.step)(jax.random.key(1), sampler.init(x)))
    print(f"{options.particles} particles in {options.dimension} dimensions, above the import:")
    print(f"  one direction                      {direction:7.0f} MB")
    print(f"  and a step with its exact median   {peak() - start:7.0f} MB")
    return direction, peak() - start


if __name__ == "__main__":
    main()
