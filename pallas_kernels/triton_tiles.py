"""Tile choices of the portable kernels, in one place.

Two families. "direct": no matrix products at all, differences (or, near the centre, expanded squares) by
fused multiply-adds, for small d. "dot": both contractions on the matrix units, for any other d.

Measured by ``python -m experiments.check_triton --tune`` on one H200 with JAX 0.11.2, milliseconds, "high":

    forward rbf   65536 x 4    direct 8 rows a thread, 4 warps 2.34; 8 warps 2.44; 16 rows 2.38; dot 3.46
                  65536 x 2    direct, unroll 8 1.51; unroll 4 1.55; 16 rows 1.58
                  65536 x 64   dot 64 x 64, 3 stages 7.16
                  16384 x 64   dot 64 x 64, 3 stages 0.46; 2 stages 0.48; 4 stages 0.63; 128 x 64 0.51-0.58;
                               128 x 128 0.52; 64 x 128 0.64; 64 x 32 0.58
                  4096 x 64    64 x 64, 3 stages, 4 splits 0.052; 2 stages 0.057; 2 splits 0.072
                  1024 x 32    64 x 64, 8 splits 0.024; 4 splits 0.023; 1 split 0.039; 32 x 64 0.026
                  64 chains 256 x 32   64 x 64, 3 stages 0.030; other tiles 0.030 to 0.034
    small rbf     1024 x 32    64 x 32, 16 splits 0.0135; 64 x 64, 8 splits 0.0161; 32 x 64 0.0170
                  512 x 64     32 x 64, 8 splits 0.0125; 64 x 64, 8 splits 0.0142; 4 splits 0.0205; 1 0.041
                  64 chains 256 x 32   64 x 64 0.0197; 64 x 32 0.0247; 32 x 64 0.0359; 8 warps 0.039
    backward rbf  65536 x 4    direct 4 rows a thread, 4 warps 8.5; 2 rows 8.8; 8 warps 10.5; dot 9.8 to 11.9
                  16384 x 64   64 x 32, 2 stages 1.33; 1 stage 1.52; 3 stages 1.89; 64 x 64 1.8; 128 x 32 1.7

The lines of "small" were timed once, with `choice=`, apart from that script. Choices for imq, for d above 64
and for "highest" and "default" were proved right there and are taken from the compiler's register and
shared-memory report, not from timings.
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
NEAR_LIMIT = 8  # largest d for which the direct forward kernel also holds the expanded squares
# Terms a lane sums in float32 before the splits are added: 65536 x 4 errs 6e-5 with 2048, 1e-5 with 512
LANE_TERMS = 512
MAX_SPLITS = 32  # each split holds an (M, d) output until they are added
SHARED_BYTES = 232448  # shared memory of a block on Hopper


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
    return max(1, min(programs // row_tiles, turns // 2, MAX_SPLITS))


def _direct(rows, bm_rows, warps, columns, unroll):
    """A direct launch: enough splits to fill the device and to keep each lane's sum short."""
    bm = bm_rows * warps
    splits = _splits(rows, bm, columns, LANES * unroll, 8 * MULTIPROCESSORS)
    splits = min(max(splits, -(-columns // (LANES * LANE_TERMS))), MAX_SPLITS)
    return Tiles("direct", bm, LANES, warps, 1, splits, unroll)


def _fitted(tiles, row_bytes, column_bytes):
    """The same tiles with as many stages, then rows, as shared memory holds."""
    while tiles.bm * row_bytes + tiles.stages * tiles.bn * column_bytes > SHARED_BYTES:
        if tiles.stages > 1:
            tiles = dataclasses.replace(tiles, stages=tiles.stages - 1)
        elif tiles.bm > 32:
            tiles = dataclasses.replace(tiles, bm=tiles.bm // 2)
        else:
            break
    return tiles


def forward_tiles(kernel, n, m, d, precision, family=None):
    """Tiles of the forward kernel for n particles, m queries, d dimensions."""
    if family is None:
        family = "direct" if d <= DIRECT_FORWARD[kernel] else "dot"
    if family == "direct":
        # rows a thread: its registers hold rows * (2 d + 1) values
        rows = 8 if d <= 4 else 4 if d <= 8 else 2
        warps = 4
        while warps > 2 and m <= 16 * rows * warps:
            warps //= 2
        return _direct(m, rows, warps, n, 8 if d <= 2 else 4 if d <= 4 else 2 if d <= 8 else 1)
    dp = max(16, next_power_of_two(d))
    if precision == "highest":  # multiply-adds: a thread holds whole operand rows
        bm, bn, warps = (32, 32, 4) if dp <= 64 else (16, 16, 4)
        return Tiles("dot", bm, bn, warps, 1, _splits(m, bm, n, bn, 4 * MULTIPROCESSORS))
    bm, bn, warps, stages = {128: (64, 64, 4, 2), 256: (64, 32, 8, 2)}.get(dp, (64, 64, 4, 3))
    splits = _splits(m, bm, n, bn, 2 * MULTIPROCESSORS)
    half_words = (2 if precision == "high" else 1) * dp * 2
    operands = 2 if kernel == "rbf" else 3
    return _fitted(Tiles("dot", bm, bn, warps, stages, splits), half_words, operands * half_words)


def small_tiles(n, m, d, precision, batch=1):
    """Tiles of the forward kernel for few particles, for batch problems at once."""
    dp = max(16, next_power_of_two(d))
    if precision == "highest":
        bm, bn, warps = (32, 32, 4) if dp <= 64 else (16, 16, 4)
    elif dp > 64:
        bm, bn, warps = 64, 32, 8
    elif batch * m >= 64 * MULTIPROCESSORS:
        bm, bn, warps = 64, 64, 4
    else:  # one problem: what takes longest is one turn after another
        bm, bn, warps = (32, 64, 4) if max(n, m) <= 512 else (64, 32, 4)
    programs, turns = batch * -(-m // bm), -(-n // bn)
    splits = max(1, min(2 * MULTIPROCESSORS // programs, turns, MAX_SPLITS))
    return Tiles("small", bm, bn, warps, 1, splits)


def backward_tiles(kernel, n, d, precision, family=None):
    """Tiles of the backward kernel for n particles, d dimensions."""
    if family is None:
        family = "direct" if d <= DIRECT_BACKWARD[kernel] else "dot"
    if family == "direct":
        return _direct(n, 4 if d <= 4 else 2 if d <= 8 else 1, 4, n, 2 if d <= 8 else 1)
    dp = max(16, next_power_of_two(d))
    if precision == "highest":
        bm, bn, warps = (32, 32, 4) if dp <= 32 else (16, 16, 4)
        return Tiles("dot", bm, bn, warps, 1, _splits(n, bm, n, bn, 4 * MULTIPROCESSORS))
    bm, bn, warps, stages = (64, 32, 4, 2) if dp <= 64 else (64, 32, 8, 1)
    splits = _splits(n, bm, n, bn, 2 * MULTIPROCESSORS)
    operands = (4 if kernel == "rbf" else 5) * (2 if precision == "high" else 1) * dp * 2
    return _fitted(Tiles("dot", bm, bn, warps, stages, splits), operands, operands)
