"""What a search needs of the particles before its first pass, in one launch: centred and scaled parts and
norms, moments of some of the distances, and zeros to count in."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_pairs as pairs
from pallas_kernels import triton_tiles as tiles
from pallas_kernels.triton_rank_tiles import bits, power, rows_from, scale_field

CENTRE = 32  # particles whose mean is the centre: it only has to be near


class Operands(NamedTuple):
    """What `prepare` makes of the particles."""

    x: jax.Array  # (n, d) float32, raw
    extents: jax.Array  # (blocks,) int32 bits of the largest |x - centre| of each block
    moments: jax.Array  # (3, blocks) sums of its own distances and their squares, largest |z|^2
    # (padded, 3 * chunks * chunk) float16, for each chunk of dimensions the low, the high and again the
    # low parts of z; None where direct
    parts: jax.Array | None
    norms: jax.Array | None  # (padded,) |z|^2


def prepare(x, layout, *, cleared):
    """(Operands, arrays of zeros like those in `cleared`), in one launch."""
    n, d, size = layout.n, layout.d, layout.size
    blocks, padded, width = layout.blocks, layout.blocks * size, layout.chunks * layout.chunk
    shapes = [
        jax.ShapeDtypeStruct((blocks,), jnp.int32),
        jax.ShapeDtypeStruct((3, blocks), jnp.float32),
    ]
    if not layout.direct:
        shapes += [jax.ShapeDtypeStruct((padded, 3 * width), jnp.float16)]
        shapes += [jax.ShapeDtypeStruct((padded,), jnp.float32)]
    given = len(shapes)
    lengths = [math.prod(shape.shape) for shape in cleared]
    shapes += [
        jax.ShapeDtypeStruct((length,), shape.dtype)
        for length, shape in zip(lengths, cleared, strict=True)
    ]

    def program(x_ref, extents_ref, moments_ref, *refs):
        i = pl.program_id(0)
        rows = rows_from(i * size, size)
        inside = i * size + jnp.arange(size) < n

        def centred(k):
            """(size, chunk) of x - centre, zeros beyond the edges."""
            at = rows_from(0 * i + k * layout.chunk, layout.chunk)
            inside_d = 0 * i + k * layout.chunk + jnp.arange(layout.chunk) < d
            first = rows_from(0 * i, CENTRE)
            few = (0 * i + jnp.arange(CENTRE) < n)[:, None] & inside_d[None, :]
            centre = plt.load(x_ref.at[first, at], mask=few, other=0.0) * (1.0 / min(n, CENTRE))
            mask = inside[:, None] & inside_d[None, :]
            raw = plt.load(x_ref.at[rows, at], mask=mask, other=0.0)
            return jnp.where(mask, raw - jnp.sum(centre, axis=0)[None, :], 0.0)

        # A NaN has the largest bits of all.
        extent = 0 * i
        for k in range(layout.chunks):
            extent = jnp.maximum(extent, jnp.max(bits(centred(k)) & 0x7FFFFFFF))
        extents_ref[i] = extent
        scale = power(scale_field(extent))
        norms = jnp.zeros((size,), jnp.float32)
        product = jnp.zeros((size, size), jnp.float32)
        for k in range(layout.chunks):
            parts = pairs.split_tile(centred(k) * scale, "high", jnp.float16)
            norms = norms + pairs.norms(parts)
            product = product + pairs.product(parts, parts, (1, 1))
            if not layout.direct:
                for place, part in enumerate((parts[1], parts[0], parts[1])):
                    at = rows_from(0 * i + (3 * k + place) * layout.chunk, layout.chunk)
                    plt.store(refs[0].at[rows, at], part)
        if not layout.direct:
            plt.store(refs[1].at[rows], norms)
        distance = norms[:, None] + norms[None, :] - 2.0 * product
        row, column = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
        counted = (row < column) & inside[:, None] & inside[None, :]
        distance = jnp.where(counted, distance, 0.0)
        moments_ref[0, i] = jnp.sum(jnp.sum(distance, axis=1), axis=0)
        moments_ref[1, i] = jnp.sum(jnp.sum(distance * distance, axis=1), axis=0)
        moments_ref[2, i] = jnp.max(norms)
        for ref, length in zip(refs[given - 2 :], lengths, strict=True):
            share = tiles.next_power_of_two(-(-length // blocks))
            at = rows_from(i * share, share)
            empty = i * share + jnp.arange(share) < length
            plt.store(ref.at[at], jnp.zeros((share,), ref.dtype), mask=empty)

    name = program.__name__ = "svgd_rank_prepare"
    out = pl.pallas_call(
        program,
        grid=(blocks,),
        in_specs=[pl.BlockSpec()],
        out_specs=[pl.BlockSpec()] * len(shapes),
        out_shape=shapes,
        compiler_params=plt.CompilerParams(num_warps=layout.warps, num_stages=1),
        interpret=layout.interpret,
        name=name,
    )(x)
    operands = Operands(x, *out[:given]) if not layout.direct else Operands(x, *out[:2], None, None)
    return operands, [
        jnp.reshape(a, shape.shape) for a, shape in zip(out[given:], cleared, strict=True)
    ]
