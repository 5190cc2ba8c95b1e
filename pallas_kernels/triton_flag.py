"""Kernels that work row by row where a flag on the device says so, and do little or nothing elsewhere.

A program owns whole rows i = p, p + programs, ... and walks over all particles in tiles of columns;
nothing is added atomically. A conditional outside of kernels would make the host wait for the device.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_tiles as tiles

PROGRAMS = 4 * tiles.MULTIPROCESSORS  # few, so that a launch with nothing to do is over at once
ROWS = 16  # a program, at least: under vmap there are as many programs for every problem
TILE = 4096  # elements of a (columns, dimensions) tile: 32 a thread


class View:
    """Dimensions start, ..., start + width - 1 of arrays with d of them; zeros beyond d.

    start is traced: JAX refuses a slice beyond an edge that it can see, mask or no mask.
    """

    def __init__(self, d, start, width):
        self.width, self.at = width, pl.ds(start, width)
        self.inside = start + jnp.arange(width) < d

    def load(self, ref, *row):
        return plt.load(ref.at[(*row, self.at)], mask=self.inside, other=0.0)

    def store(self, ref, row, value):
        plt.store(ref.at[row, self.at], value, mask=self.inside)

    def tile(self, ref, columns, inside):
        mask = inside[:, None] & self.inside[None, :]
        return plt.load(ref.at[columns, self.at], mask=mask, other=0.0)


def width(d):
    return max(16, tiles.next_power_of_two(d))


def columns(t, size, n):
    return pl.ds(t * size, size), t * size + jnp.arange(size) < n


def walk(n, width, tile, start):
    """tile(columns, inside, carry) over all n particles."""
    size = min(TILE // width, max(16, tiles.next_power_of_two(n)))
    step = lambda t, carry: tile(*columns(t, size, n), carry)
    return loop(-(-n // size), step, start)


def loop(turns, body, start):
    """A loop whose counter has the type of a program's number, x64 or not: they index together."""
    return lax.fori_loop(0, turns, lambda t, carry: body(t.astype(jnp.int32), carry), start)


def overwrite(row, outputs, far, arrays, rows, name, interpret):
    """row(i, refs, output refs) for every i < rows where far is set; the outputs as they are elsewhere."""
    # The interpreter copies whole arrays for every program.
    programs = min(-(-rows // ROWS), 4 if interpret else PROGRAMS)
    count = len(arrays)
    return behind_flag(
        lambda i, refs, out_refs: row(i, refs[:count], out_refs),
        None,
        far,
        [*arrays, *outputs],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs],
        rows=rows,
        programs=programs,
        name=name,
        interpret=interpret,
        aliases={1 + count + k: k for k in range(len(outputs))},
    )


def behind_flag(
    row, otherwise, far, arrays, out_shape, *, rows, programs, name, interpret, aliases=None
):
    """row(i, refs, output refs) for every i < rows where far is set, otherwise(program, refs, output refs)
    elsewhere."""
    far = jnp.reshape(far, (-1,)).astype(jnp.int32)
    count = far.shape[0]

    def program(far_ref, *refs):
        given, out_refs = refs[: len(arrays)], refs[len(arrays) :]
        first = pl.program_id(0)
        flags = pl.ds(0 * first, tiles.next_power_of_two(count))
        inside = 0 * first + jnp.arange(flags.size) < count
        is_far = jnp.max(plt.load(far_ref.at[flags], mask=inside, other=0)) != 0

        @pl.when(is_far)
        def _():
            def turn(k, _):
                # Beyond the end the last row is made again, to the same bits.
                row(jnp.minimum(first + k * programs, rows - 1), given, out_refs)
                return 0

            loop(-(-rows // programs), turn, 0)

        if otherwise is not None:
            pl.when(~is_far)(lambda: otherwise(first, given, out_refs))

    program.__name__ = name
    return pl.pallas_call(
        program,
        grid=(programs,),
        in_specs=[pl.BlockSpec()] * (1 + len(arrays)),
        out_specs=[pl.BlockSpec()] * len(out_shape),
        out_shape=out_shape,
        input_output_aliases=aliases or {},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=name,
    )(far, *arrays)
