"""Tile sizes of the Hopper kernels: one table of heuristics, and what they need of shared memory."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from pallas_kernels.hopper_operands import Layout, layout_for

__all__ = ["BackwardTiles", "ForwardTiles", "backward_tiles", "check", "fits", "forward_tiles"]

SHARED_MEMORY = 232448
"""Bytes of shared memory a block may have on Hopper."""

ALIGNMENT = 1024
"""Every buffer starts at a multiple of this many bytes."""

MULTIPROCESSORS = 132
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
      overlap: whether the second product of a step runs beside the first of the next.
      splits: parts of the keys, each summed by blocks of its own and added outside.
    """

    block_q: int = 64
    block_k: int = 128
    warpgroups: int = 2
    stages: int = 2
    overlap: bool = False
    splits: int = 1
    q_in_registers: bool = False

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
    """Parts of the keys so that ``blocks`` blocks of ``steps`` steps fill the multiprocessors."""
    if blocks >= MULTIPROCESSORS:
        return 1
    return max(1, min(steps, MULTIPROCESSORS // blocks))


def forward_tiles(n: int, m: int, d: int, precision: str, batch: int = 1):
    """(layout, tiles) of the direction for n keys, m queries, d dimensions, batch problems."""
    layout = layout_for(d, precision, PACKED_UP_TO)
    if layout.columns * 2 > 512:
        tiles = ForwardTiles(block_k=32 if layout.chunks == 4 else 64, stages=1)
    elif layout.chunks > 1:
        tiles = ForwardTiles(block_k=64, stages=2)
    else:
        tiles = ForwardTiles()
    if batch * math.ceil(m / (tiles.block_q * tiles.warpgroups)) < MULTIPROCESSORS // 2:
        tiles = dataclasses.replace(tiles, warpgroups=1, block_k=min(tiles.block_k, 64))
    blocks = batch * math.ceil(m / (tiles.block_q * tiles.warpgroups))
    steps = math.ceil(n / tiles.block_k)
    return layout, dataclasses.replace(tiles, splits=splits_for(blocks, steps))


def backward_tiles(n: int, d: int, precision: str, batch: int = 1):
    """(layout, tiles) of the vector-Jacobian product."""
    layout = layout_for(d, precision, 0)
    tiles = BackwardTiles(stages=1 if layout.lane == 64 else 2)
    if layout.chunks > 1:
        tiles = BackwardTiles(warpgroups=1, stages=1, half_exponent=layout.pieces == 1)
    if batch * math.ceil(n / (tiles.block_q * tiles.warpgroups)) < MULTIPROCESSORS // 2:
        tiles = dataclasses.replace(tiles, warpgroups=1)
    blocks = batch * math.ceil(n / (tiles.block_q * tiles.warpgroups))
    steps = math.ceil(n / tiles.block_k)
    return layout, dataclasses.replace(tiles, splits=splits_for(blocks, steps))


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
