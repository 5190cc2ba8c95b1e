"""Tile choices of the portable kernels, in one place.

Two families. "direct": no matrix products at all, differences (or, near the centre, expanded squares) by
fused multiply-adds, for small d. "dot": both contractions on the matrix units, for any other d.

Measured on one H200 (JAX 0.11.2) by ``python -m experiments.check_triton``.
"""

import dataclasses

import jax.numpy as jnp

LANES = 32  # columns of a direct tile: one a lane, so that a warp owns whole rows
MULTIPROCESSORS = 132  # an H200's; only decides how many splits fill the device
MAX_DIMENSION = 256  # above it a row tile and its accumulators leave registers and shared memory
MAX_DIMENSION_BACKWARD = 128
DIRECT_FORWARD = {"rbf": 8, "imq": 8}  # largest d for which direct is chosen by itself
DIRECT_BACKWARD = {"rbf": 4, "imq": 4}
DIRECT_LIMIT = 16  # largest d that the direct family accepts


@dataclasses.dataclass(frozen=True)
class Tiles:
    """One launch: bm rows a program, bn columns a step, `unroll` steps a loop turn, `splits` over columns."""

    family: str
    bm: int
    bn: int
    warps: int
    stages: int
    splits: int
    unroll: int = 1

    @property
    def columns(self):
        """Columns a loop turn covers; particles are padded to a multiple of it."""
        return self.bn * self.unroll


def refusal(kernel, n, m, d, precision, dtype, largest):
    """(True, "") or (False, what the portable kernels do not cover)."""
    if kernel not in ("rbf", "imq"):
        return (
            False,
            f"kernel must be 'rbf' or 'imq' for the portable Pallas kernels, got {kernel!r}",
        )
    if precision not in ("highest", "high", "default"):
        return False, f"precision must be 'highest', 'high' or 'default', got {precision!r}"
    if jnp.dtype(dtype) != jnp.float32:
        return False, f"the portable Pallas kernels compute in float32, got {jnp.dtype(dtype).name}"
    if min(n, m, d) < 1:
        return False, f"n, m and d must be at least 1, got {n}, {m} and {d}"
    if d > largest:
        return (
            False,
            f"d = {d} is above {largest}: a row tile would leave registers and shared memory",
        )
    return True, ""


def check_family(tiles, d):
    """Raises ValueError when the direct family is asked for more dimensions than it accepts."""
    if tiles.family == "direct" and d > DIRECT_LIMIT:
        raise ValueError(f"family 'direct' needs d <= {DIRECT_LIMIT}, got d = {d}")


def next_power_of_two(n):
    return 1 << max(0, n - 1).bit_length()


def round_up(n, multiple):
    return -(-n // multiple) * multiple


def _splits(rows, bm, columns, step, programs):
    """Splits over columns that bring the grid to about `programs`, each with two loop turns or more."""
    row_tiles = -(-rows // bm)
    turns = -(-columns // step)
    if columns <= 512:  # short loops: a second launch to add the parts costs more than it saves
        return 1
    return max(1, min(programs // row_tiles, turns // 2, 32))


def forward_tiles(kernel, n, m, d, precision, family=None):
    """Tiles of the forward kernel for n particles, m queries, d dimensions."""
    if family is None:
        family = "direct" if d <= DIRECT_FORWARD[kernel] else "dot"
    if family == "direct":
        rows = (
            8 if d <= 4 and kernel == "rbf" else 4
        )  # a thread: its registers hold rows * (2 d + 1) values
        warps, unroll = 8, 4
        while warps > 2 and m <= 128 * rows * warps // 8:
            warps //= 2
        bm = rows * warps
        splits = _splits(m, bm, n, LANES * unroll, 8 * MULTIPROCESSORS)
        return Tiles("direct", bm, LANES, warps, 1, splits, unroll)
    dp = max(16, next_power_of_two(d))
    if precision == "highest":  # multiply-adds: a thread holds whole operand rows
        bm, bn, warps = (32, 32, 4) if dp <= 64 else (16, 16, 4)
        return Tiles("dot", bm, bn, warps, 1, _splits(m, bm, n, bn, 4 * MULTIPROCESSORS))
    if dp <= 64:
        bm, bn, warps, stages = (128, 64, 4, 3) if m >= 8192 else (64, 64, 4, 3)
    elif dp == 128:
        bm, bn, warps, stages = 128, 64, 8, 2
    else:
        bm, bn, warps, stages = 64, 32, 4, 1
    return Tiles("dot", bm, bn, warps, stages, _splits(m, bm, n, bn, 2 * MULTIPROCESSORS))


def backward_tiles(kernel, n, d, precision, family=None):
    """Tiles of the backward kernel for n particles, d dimensions."""
    if family is None:
        family = "direct" if d <= DIRECT_BACKWARD[kernel] else "dot"
    if family == "direct":
        rows = 4 if d <= 4 else 2 if d <= 8 else 1
        warps = 8 if n > 4096 else 4
        bm = rows * warps
        splits = _splits(n, bm, n, 2 * LANES, 8 * MULTIPROCESSORS)
        return Tiles("direct", bm, LANES, warps, 1, splits, 2)
    dp = max(16, next_power_of_two(d))
    if precision == "highest":
        bm, bn, warps = (32, 32, 4) if dp <= 32 else (16, 16, 4)
        return Tiles("dot", bm, bn, warps, 1, _splits(n, bm, n, bn, 4 * MULTIPROCESSORS))
    bm, bn, warps, stages = (64, 32, 4, 2) if dp <= 64 else (64, 32, 8, 1)
    return Tiles("dot", bm, bn, warps, stages, _splits(n, bm, n, bn, 2 * MULTIPROCESSORS))
