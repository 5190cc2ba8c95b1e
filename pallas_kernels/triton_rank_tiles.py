"""Squared distances of all pairs of particles in square tiles, the same bits in every kernel that asks.

Particles are cut into blocks of B rows. Block i meets the blocks i, i+1, ..., i + blocks // 2, wrapping
around: every pair of blocks once, and inside a diagonal tile only what lies above the diagonal counts.

    |x_i - x_j|^2 = |z_i|^2 + |z_j|^2 - 2 z_i.z_j    products of 16-bit parts of centred, scaled particles
                  = sum_c (x_ic - x_jc)^2            few dimensions, or distances small beside |z|

Each block is scaled by a power of two of its own, so one launch prepares everything; a tile takes both
blocks to the scale of the block that reaches farthest, which rounds nothing.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_pairs as pairs
from pallas_kernels import triton_tiles as tiles

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
        """How many pairs the tiles of the first `offsets` offsets hold."""
        sizes = np.minimum(self.size, self.n - self.size * np.arange(self.blocks))
        total = np.sum(sizes * (sizes - 1) // 2)
        for o in range(1, min(offsets, self.offsets)):
            count = self.blocks if 2 * o < self.blocks else self.blocks // 2
            total += sizes[:count] @ np.roll(sizes, -o)[:count]
        return int(total)


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
