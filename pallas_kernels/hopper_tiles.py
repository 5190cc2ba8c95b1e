"""Tile sizes of the Hopper kernels: one table of heuristics, and what they need of shared memory.

Measured on one H200 (JAX 0.11.2) by ``python -m experiments.check_hopper --only time``, in ms:

    N = 65536, d = 64    3 warpgroups, 3 parts 5.24; 3 and 1 part 5.48; 2 warpgroups 6.10; 64 keys 6.98
    N = 16384, d = 64    3 warpgroups, 3 parts 0.359; 2 warpgroups 0.404
    N = 16384, d = 128   2 warpgroups, 64 keys, 2 stages 0.736; 128 keys, 1 stage 0.90
                         (with two chunks' sums in flight 0.792, and 0.693 with K cut by integers)
    N = 16384, d = 256   1 warpgroup, 32 keys, 2 stages: fresh sums 2.70; runs of 4 steps 2.73, 8 2.30,
                         16 2.11, 32 1.99, 64 1.94 (errors 7e-6, then 7e-6 to 1.9e-5); 1 stage 2.31 at 16;
                         64 keys 3.8 (spills); 2 warpgroups 3.6 to 3.9 (168 registers, spills)
    N = 16384, d = 190   1 warpgroup: 32 keys, fresh sums 1.55; 64 keys, 1 stage, runs of 8 1.45, 16 1.35
    N = 65536, d = 4     3 warpgroups, 3 parts 2.82; K cut by integers 1.95; 1 part 3.20
    N = 4096, d = 64     1 warpgroup, 2 parts 0.060 to 0.063; 3 warpgroups, 6 parts 0.059
    N = 1024, d = 32     1 warpgroup, 8 parts 0.022; 4 parts 0.026

The integer cut was timed when it dropped the upper half's rounding, one instruction less than now.
Tried and slower: the second product beside the next block's first (65536 x 64 with 2 warpgroups 6.15,
16384 x 256 9.9), and in the backward elementwise work beside products of the same warpgroup (16384 x 64
1.13 with two stages, 1.30 with one and float16 exponents). The backward's present form is not yet timed.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from pallas_kernels.hopper_operands import Layout, layout_for

__all__ = [
    "BackwardTiles",
    "ForwardTiles",
    "backward_tiles",
    "check",
    "common_rows",
    "fits",
    "forward_tiles",
    "round_up",
]

SHARED_MEMORY = 232448
"""Bytes of shared memory a block may have on Hopper."""

ALIGNMENT = 1024
"""Every buffer starts at a multiple of this many bytes."""

MULTIPROCESSORS = 132
MAX_SPLITS = 16
PACKED_UP_TO = 9
MAX_D = 256
MIN_N = 64
"""Below, nothing is gained, and the 16 bits of a value (7e-6) do not average out."""


@dataclasses.dataclass(frozen=True)
class ForwardTiles:
    """Tiles of the direction.

    Attributes:
      block_q: rows of one compute warpgroup (wgmma has 64).
      block_k: keys of one step.
      warpgroups: compute warpgroups of a block; one more issues the copies.
      stages: steps of keys and values in shared memory at once.
      splits: parts of the keys, each summed by blocks of its own and added outside.
      cut_bits: whether K is halved by integer instructions instead of conversions.
      run: steps that one accumulator sums before it is added to the result in global memory; 0: every
        step has a fresh one, added to sums in registers, for which many dimensions leave no room. With
        one warpgroup alone: with several, results changed from run to run, for a reason not found.
    """

    block_q: int = 64
    block_k: int = 128
    warpgroups: int = 2
    stages: int = 2
    splits: int = 1
    cut_bits: bool = False
    run: int = 0

    def __post_init__(self):
        if self.run and self.warpgroups != 1:
            raise ValueError(f"run={self.run} needs one warpgroup, got {self.warpgroups}")

    def shared_memory(self, layout: Layout) -> int:
        """Bytes of shared memory of one block."""
        rows, keys = self.warpgroups * self.block_q, self.stages * self.block_k
        per_chunk = 2 * keys * layout.pieces
        return shared_memory(
            2 * rows * layout.columns,
            4 * rows,
            4 * keys,
            *[per_chunk * layout.lane, per_chunk * layout.value_lane] * layout.chunks,
        )


@dataclasses.dataclass(frozen=True)
class BackwardTiles:
    """Tiles of the vector-Jacobian product; attributes as in :class:`ForwardTiles`, and:

    Attributes:
      half_exponent: whether the exponent has float16 operands of its own (22 bits), beside the bfloat16
        ones (16 bits) of the products with values.
    """

    block_q: int = 64
    block_k: int = 64
    warpgroups: int = 2
    stages: int = 2
    splits: int = 1
    cut_bits: bool = True
    half_exponent: bool = True

    @property
    def key_operands(self) -> int:
        """Matrices of keys in shared memory."""
        return 3 + self.half_exponent

    def shared_memory(self, layout: Layout) -> int:
        """Bytes of shared memory of one block: three operands of rows and of keys, two vectors."""
        rows, keys = self.warpgroups * self.block_q, self.stages * self.block_k
        return shared_memory(
            *[2 * rows * layout.columns] * 3,
            *[4 * rows] * 2,
            *[4 * keys] * 2,
            *[2 * keys * layout.pieces * layout.lane] * (self.key_operands * layout.chunks),
        )


def shared_memory(*buffers: int) -> int:
    """Bytes that buffers of these sizes take, aligned, with room for the barriers."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in buffers) + 3 * ALIGNMENT


def splits_for(blocks: int, steps: int) -> int:
    """Parts of the keys so that the multiprocessors finish together.

    A block of s steps costs about s + 2 (start, epilogue, the sum over parts); blocks run in waves.
    Among equals the fewest parts. Measured at 65536 x 4 with 342 blocks: 4 parts 2.92 ms, 1 part 3.20.
    """

    def cost(parts):
        return math.ceil(blocks * parts / MULTIPROCESSORS) * (math.ceil(steps / parts) + 2)

    parts = range(1, min(steps, MAX_SPLITS) + 1)
    enough = 1.02 * min(map(cost, parts))
    return next(p for p in parts if cost(p) <= enough)


def forward_tiles(n: int, m: int, d: int, precision: str, batch: int = 1):
    """(layout, tiles) of the direction for n keys, m queries, d dimensions, batch problems."""
    layout = layout_for(d, precision, PACKED_UP_TO)
    if layout.chunks > 2 and layout.pieces == 2:
        # Two warpgroups would leave 168 registers a thread for 256 sums of 64 rows.
        tiles = ForwardTiles(warpgroups=1, block_k=32, cut_bits=True, run=32)
        if layout.chunks == 3:
            tiles = ForwardTiles(warpgroups=1, block_k=64, stages=1, cut_bits=True, run=16)
    elif layout.chunks > 2:
        tiles = ForwardTiles(warpgroups=1, block_k=64, cut_bits=True)
    elif layout.chunks == 2:
        tiles = ForwardTiles(block_k=64, cut_bits=True)
    elif batch * math.ceil(m / 64) <= MULTIPROCESSORS:
        # Few rows: one warpgroup a block spreads them over more multiprocessors.
        tiles = ForwardTiles(warpgroups=1, block_k=64, cut_bits=layout.packed)
    else:
        # Three warpgroups, unless two leave fewer rows of a small problem unused.
        three = m > 1024 or math.ceil(m / 64) % 3 == 0
        tiles = ForwardTiles(warpgroups=3 if three else 2, cut_bits=layout.packed)
    return layout, _split(tiles, n, m, batch)


def backward_tiles(n: int, d: int, precision: str, batch: int = 1):
    """(layout, tiles) of the vector-Jacobian product."""
    layout = layout_for(d, precision, 0)
    # From 64 columns on, two stages leave no room for a second copy of y.
    tiles = BackwardTiles(half_exponent=layout.lane < 64)
    if layout.chunks > 1:
        tiles = dataclasses.replace(tiles, warpgroups=1, stages=1)
    elif batch * math.ceil(n / 128) < MULTIPROCESSORS // 2:
        tiles = dataclasses.replace(tiles, warpgroups=1)
    return layout, _split(tiles, n, n, batch)


def _split(tiles, n: int, m: int, batch: int):
    blocks = batch * math.ceil(m / (tiles.block_q * tiles.warpgroups))
    return dataclasses.replace(tiles, splits=splits_for(blocks, math.ceil(n / tiles.block_k)))


def round_up(rows: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is at least ``rows``."""
    return -(-rows // multiple) * multiple


def common_rows(n: int, tiles) -> int | None:
    """Rows that n particles pad to as queries and as keys at once; None where that costs over 3%."""
    rows = round_up(n, math.lcm(tiles.warpgroups * tiles.block_q, tiles.splits * tiles.block_k))
    least = round_up(n, tiles.warpgroups * tiles.block_q)
    return rows if rows <= 1.03 * least else None


def check(kernel: str, n: int, d: int, precision: str, dtype, available) -> tuple[bool, str] | None:
    """(False, why) for arguments that no tile size would make acceptable, else None."""
    if not available[0]:
        return available
    if kernel != "rbf":
        return False, f"kernel must be 'rbf', got {kernel!r}"
    if precision not in ("high", "default"):
        return False, f"precision must be 'high' or 'default', got {precision!r}"
    if jnp.dtype(dtype) != jnp.float32:
        return False, f"dtype must be float32, got {jnp.dtype(dtype)}"
    if n < MIN_N:
        return False, f"at least {MIN_N} particles, got {n}"
    if not 1 <= d <= MAX_D:
        return False, f"d must be between 1 and {MAX_D}, got {d}"
    return None


def fits(layout: Layout, tiles) -> tuple[bool, str]:
    """(whether a block's shared memory suffices, why not)."""
    need = tiles.shared_memory(layout)
    if need > SHARED_MEMORY:
        return False, f"shared memory: {need} bytes needed, {SHARED_MEMORY} there are ({tiles})"
    return True, ""
