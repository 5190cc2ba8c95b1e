"""Squared distances of all pairs of particles in square tiles, the same bits in every kernel that asks.

Particles are cut into blocks of B rows. Block i meets the blocks i, i+1, ..., i + blocks // 2, wrapping
around: every pair of blocks once, and inside a diagonal tile only what lies above the diagonal counts.

    |x_i - x_j|^2 = |z_i|^2 + |z_j|^2 - 2 z_i.z_j    products of 16-bit parts of centred, scaled particles
                  = sum_c (x_ic - x_jc)^2            few dimensions, or distances small beside |z|

Each block is scaled by a power of two of its own, so one launch prepares everything; a tile takes both
blocks to the scale of the block that reaches farthest, which rounds nothing.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_pairs as pairs
from pallas_kernels import triton_tiles as tiles

CENTRE = 32  # particles whose mean is the centre: it only has to be near
DIRECT = 8  # dimensions up to which differences cost no more than products
REACH = 7  # the largest coordinate of a block is scaled into [2^7, 2^8), well inside float16
FAR = 2.0**60  # distance of a pair that does not count
# Part of the largest |z|^2 below which products give distances to less than 1e-4.
COARSE = 8 * 2.0**-11.5
LEFT, RIGHT = range(2)
INFINITE = 0x7F800000  # bits of infinity; NaN's are above


@dataclasses.dataclass(frozen=True)
class Layout:
    """The static cut of n particles in d dimensions into blocks of `size` rows."""

    n: int
    d: int
    size: int
    warps: int
    interpret: bool = False

    @property
    def blocks(self):
        return -(-self.n // self.size)

    @property
    def offsets(self):
        """Block i meets block i + o for o < offsets; for the last o of an even number, only half do."""
        return self.blocks // 2 + 1

    @property
    def direct(self):
        """Whether differences are always taken."""
        return self.d <= DIRECT

    @property
    def chunk(self):
        """Dimensions of one product."""
        return min(64, max(16, tiles.next_power_of_two(self.d)))

    @property
    def chunks(self):
        return -(-self.d // self.chunk)

    def pairs_within(self, offsets):
        """How many pairs the tiles of the first `offsets` offsets hold, and how many there are."""
        sizes = [min(self.size, self.n - i * self.size) for i in range(self.blocks)]
        total = sum(s * (s - 1) // 2 for s in sizes)
        for o in range(1, min(offsets, self.offsets)):
            count = self.blocks if 2 * o < self.blocks else self.blocks // 2
            total += sum(sizes[i] * sizes[(i + o) % self.blocks] for i in range(count))
        return total


class Operands(NamedTuple):
    """What `prepare` makes of the particles."""

    x: jax.Array  # (n, d) float32, raw
    extents: jax.Array  # (blocks,) int32 bits of the largest |x - centre| of each block
    moments: jax.Array  # (3, blocks) sums of its own distances and their squares, largest |z|^2
    # (padded, 3 * chunks * chunk) float16, for each chunk of dimensions the low, the high and again the
    # low parts of z; None where direct
    parts: jax.Array | None
    norms: jax.Array | None  # (padded,) |z|^2


def bits(x):
    return lax.bitcast_convert_type(x, jnp.int32)


def number(x):
    return lax.bitcast_convert_type(x, jnp.float32)


def power(field):
    """2^(field - 127), and 0 below the range of normal numbers."""
    return number(jnp.clip(field, 0, 254) << 23)


def scale_field(extent):
    """Exponent field of the power of two that takes the extent (bits) into [2^REACH, 2^(REACH + 1))."""
    return jnp.clip(254 + REACH - (extent >> 23), 1, 254)


def rows_from(start, size):
    """A traced slice: JAX refuses one beyond an edge that it can see, mask or no mask."""
    return pl.ds(start, size)


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


def walk_tiles(distances, walk, visit, carry):
    """The carry after visit(distance, carry) for each tile of a program.

    Args:
      distances: `Distances`. walk: (block, first offset, stride, offsets).
    """
    layout = distances.layout
    i, split, splits, offsets = walk
    turns = -(-offsets // splits)
    left = distances.block(i, LEFT)

    def turn(t, carry):
        offset = split + t * splits
        visited = (offset < offsets) & is_pair_of_blocks(layout, i, offset)
        rows, inside, far, *rest = distances.block((i + offset) % layout.blocks, RIGHT)
        right = (rows, inside, jnp.where(visited, far, FAR), *rest)
        return visit(distances.tile(left, right, offset), carry)

    return turn(0 * i, carry) if turns == 1 else lax.fori_loop(0, turns, turn, carry)


def is_pair_of_blocks(layout, i, offset):
    """Whether the tile of block i and block i + offset is one to visit."""
    twice, blocks = 2 * offset, layout.blocks
    return (twice < blocks) | ((twice == blocks) & (2 * i < blocks))


class Distances:
    """Tiles of squared distances inside a kernel, in units of the common scale.

    Args:
      layout: a `Layout`. refs: references to `Operands`, without those that are None.
      field: exponent field of the common scale, a traced int32.
      direct: whether to take differences, static.
    """

    def __init__(self, layout, refs, field, direct):
        self.layout, self.field, self.direct = layout, field, direct
        self.x, self.extents = refs[0], refs[1]
        if not layout.direct:
            self.parts, self.norms = refs[3:]

    def block(self, i, side):
        """What a tile needs of block i, loaded once for many tiles. side: LEFT or RIGHT, static."""
        layout = self.layout
        rows = rows_from(i * layout.size, layout.size)
        inside = i * layout.size + jnp.arange(layout.size) < layout.n
        if self.direct:
            return rows, inside, jnp.where(inside, 0.0, FAR), None, None
        own = scale_field(self.extents[i])
        # Nothing is rounded: to the common scale by a power of two, at most 1.
        factor = power(127 + self.field - own)
        norms = plt.load(self.norms.at[rows]) * factor * factor
        pieces = self._pieces(rows, 0 * i, side) if layout.chunks == 1 else None
        return rows, inside, jnp.where(inside, norms, FAR), factor, pieces

    def _pieces(self, rows, k, side):
        """The parts of chunk k, low beside high on the left and high beside low on the right; the high
        ones alone."""
        chunk = self.layout.chunk
        return tuple(
            plt.load(self.parts.at[rows, rows_from((3 * k + place) * chunk, width * chunk)])
            for place, width in ((side, 2), (1, 1))
        )

    def _product(self, left, right):
        """z_i.z_j from the pieces of a chunk, with the same bits in every kernel.

        A compiler may let a product start from the sum before it, on units that round otherwise, or
        add it afterwards, and it decides so kernel by kernel. The two small products are one here, and
        an instruction that is no product keeps the large one apart.
        """
        small, large = (pairs.product((a,), (b,), (1, 1)) for a, b in zip(left, right, strict=True))
        if not self.layout.interpret:
            small, large = (pairs.opaque(term) for term in (small, large))
        return small + large

    def tile(self, left, right, offset):
        """(size, size) distances of two blocks; FAR where a pair does not count.

        Not below 0 by more than rounding. offset: from the left block to the right one.
        """
        layout = self.layout
        far = left[2][:, None] + right[2][None, :]
        if self.direct:
            distance = self._differences(left, right) + far
        else:
            if layout.chunks == 1:
                product = self._product(left[4], right[4])
            else:

                def along(k, total):
                    return total + self._product(
                        self._pieces(left[0], k, LEFT), self._pieces(right[0], k, RIGHT)
                    )

                zero = jnp.zeros((layout.size, layout.size), jnp.float32)
                product = lax.fori_loop(0, layout.chunks, along, zero)
            factor = jnp.full((1, 1), -2.0, jnp.float32) * (left[3] * right[3])
            distance = pairs.fma(product, factor, far, layout.interpret)
        row, column = jnp.arange(layout.size)[:, None], jnp.arange(layout.size)[None, :]
        return jnp.where((row < column) | (offset > 0), distance, FAR)

    def _differences(self, left, right):
        layout = self.layout
        scale = power(self.field)
        sign = self.extents[0] >> 31  # an integer 0 unknown to the compiler

        def add(c, total):
            xi, xj = (
                scale * plt.load(self.x.at[rows, c], mask=inside, other=0.0)
                for rows, inside, *_ in (left, right)
            )
            difference = xi[:, None] - xj[None, :]
            if layout.interpret:
                # Rounded here: the CPU's compiler is free to fuse, in one kernel and not another.
                return total + number(bits(difference * difference) ^ sign)
            return pairs.fma(difference, difference, total, False)

        total = jnp.zeros((layout.size, layout.size), jnp.float32)
        return lax.fori_loop(0, layout.d, add, total)
