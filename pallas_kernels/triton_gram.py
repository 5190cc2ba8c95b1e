"""Portable kernels for few particles in many dimensions: N up to a few thousand, d up to millions.

Rows no longer fit in a tile, so the work is cut along d instead, and the N x N weights are made in between:

    gram      G = Z Z^T,  z = scale (x - centre): a program sums one tile of G over its share of d.
    combine   phi = 1/N [ K s + c (rowsum(W) z - W z) ]: a program makes one tile (rows, columns of d).

Up to a few hundred particles memory is the bound: both kernels read x and s as they are, centring, scaling
and splitting on the way, so a direction reads x twice and s once and writes phi once, the floor of 4 N d
numbers. With more, products are the bound and every tile is read by many programs: operands are split
once, outside, and padded to whole tiles, so that the matrix units are fed by plain copies.

Measured on one H200 (JAX 0.11.2), microseconds a call with about 120 for the loop's own copy of x:

    64 x 1000000    gram 64 columns, 3 stages 260; 2 stages 304; 4 stages 316; 8 warps 341
                    combine 64 columns, 2 stages 386; 128 columns 441; 8 warps 537 to 587
    1024 x 65536    gram 64 columns, 3 stages 733 to 757; 32 columns 895; 2 stages 925; 64 rows 916
                    combine depth 64 1276; 32 1452; 256 columns 1831; 256 rows 2118; 4 warps 1954
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_pairs as pairs
from pallas_kernels import triton_tiles as tiles

SPLIT_OUTSIDE_FROM = 257  # particles


@dataclasses.dataclass(frozen=True)
class GramTiles:
    """rows (of one side of the tile), columns of d a step, depth of the sum over particles, shares of d."""

    rows: int
    columns: int
    warps: int
    stages: int
    depth: int = 0
    shares: int = 1


def gram_tiles(n, d):
    """A tile of G, summed over a share of d; enough shares to fill the device with the tiles there are."""
    rows = min(128, max(16, tiles.next_power_of_two(n)))
    columns = 64 if rows < 128 or n >= SPLIT_OUTSIDE_FROM else 32
    side = -(-n // rows)
    programs = (4 if rows <= 64 or n >= SPLIT_OUTSIDE_FROM else 2) * tiles.MULTIPROCESSORS
    shares = max(1, min(programs // (side * (side + 1) // 2), -(-d // (4 * columns))))
    return GramTiles(rows, columns, 4 if rows <= 64 else 8, 3, shares=shares)


def combine_tiles(n, kernel):
    """A tile of phi. All rows at once where they fit, so that x and s are read once."""
    if n >= SPLIT_OUTSIDE_FROM:  # imq has two matrices in shared memory
        return GramTiles(128, 128, 8, 3, 64 if kernel == "rbf" else 32)
    rows = min(128, max(16, tiles.next_power_of_two(n)))
    columns = {128: 128, 64: 64}.get(rows, 256)
    return GramTiles(rows, columns, 4 if rows <= 64 else 8, 2, min(rows, 32))


def supports(kernel, n, m, d, precision, dtype):
    """Whether `gram` and `combine` cover a case: (bool, reason); reason is "" when they do."""
    if m != n:
        return False, f"few particles in many dimensions need queries = particles, got m = {m}"
    return tiles.refusal(kernel, n, m, d, precision, dtype, largest=1 << 30)


def gram(x, centre, scale, *, precision, interpret=False, choice=None):
    """Z Z^T of z = scale (x - centre).

    Args:
      x: (N, d) float32. centre, scale: (d,) float32.
      precision: "highest", "high" or "default".

    Returns:
      (N, N) float32, symmetric to the bit.
    """
    n, d = x.shape
    choice = choice or gram_tiles(n, d)
    side = -(-n // choice.rows)
    row, column = np.tril_indices(side)  # the other half is its mirror image
    turns = -(-d // (choice.columns * choice.shares))
    if n >= SPLIT_OUTSIDE_FROM:
        whole = side * choice.rows, turns * choice.columns * choice.shares
        arrays = pairs.split(_padded(scale * (x - centre), *whole), jnp.bfloat16, precision)

        def parts(refs, start_row, start):
            at = pl.ds(start_row, choice.rows), pl.ds(start, choice.columns)
            return tuple(ref[at] for ref in refs)

    else:
        arrays = x, centre, scale

        def parts(refs, start_row, start):
            return pairs.split_tile(_z(*refs, start_row, start, choice), precision)

    def program(row_ref, column_ref, *refs):
        *refs, out_ref = refs
        t, share = pl.program_id(0), pl.program_id(1)
        left_row, right_row = (ref[t] * choice.rows for ref in (row_ref, column_ref))

        def turn(k, total):
            start = (share * turns + k) * choice.columns
            left, right = parts(refs, left_row, start), parts(refs, right_row, start)
            return total + pairs.product(left, right, (1, 1))

        zero = jnp.zeros((choice.rows, choice.rows), jnp.float32)
        out_ref[0, 0] = lax.fori_loop(0, turns, turn, zero)

    sums = pl.pallas_call(
        program,
        grid=(len(row), choice.shares),
        in_specs=[pl.BlockSpec()] * (2 + len(arrays)),
        out_specs=pl.BlockSpec((1, 1, choice.rows, choice.rows), lambda t, share: (share, t, 0, 0)),
        out_shape=jax.ShapeDtypeStruct(
            (choice.shares, len(row), choice.rows, choice.rows), jnp.float32
        ),
        compiler_params=plt.CompilerParams(num_warps=choice.warps, num_stages=choice.stages),
        interpret=interpret,
        name="svgd_gram",
    )(jnp.asarray(row, jnp.int32), jnp.asarray(column, jnp.int32), *arrays)
    half = jnp.zeros((side, side, choice.rows, choice.rows), jnp.float32)
    half = half.at[row, column].set(jnp.sum(sums, axis=0))
    half = half.transpose(0, 2, 1, 3).reshape(side * choice.rows, side * choice.rows)[:n, :n]
    lower = jnp.tril(half)
    return lower + jnp.tril(half, -1).T


def combine(
    weights,
    slopes,
    x,
    s,
    centre,
    scale,
    c,
    *,
    kernel,
    precision,
    base=False,
    step=None,
    interpret=False,
    choice=None,
):
    """phi from the weights, or x + step * phi.

    Args:
      weights, slopes: (N, N) float32, K and W.
      x, s: (N, d) float32. centre, scale, c: (d,) float32, c = repulsion/sqrt(h).
      base: whether the result is x + step * phi; step: float32 scalar then.

    Returns:
      (N, d) float32.
    """
    n, d = x.shape
    choice = choice or combine_tiles(n, kernel)
    size = tiles.round_up(n, max(choice.rows, choice.depth))
    step = jnp.reshape(jnp.asarray(0.0 if step is None else step, jnp.float32), (1,))
    # phi = sum of these products + rowsum(W) c z_i
    same = kernel == "rbf"
    matrices = [weights] if same else [weights, slopes]
    matrices = [
        part
        for matrix in matrices
        for part in pairs.split(_padded(matrix, size, size), jnp.bfloat16, precision)
    ]
    each = len(matrices) // (1 if same else 2)
    row_sums = jnp.pad(jnp.sum(slopes, axis=1), (0, size - n))
    once = [row_sums, x, s, centre, scale, c, step]

    def sources(score, drift_z):
        """What the matrices are multiplied with."""
        return [score - drift_z] if same else [score, -drift_z]

    outside = n >= SPLIT_OUTSIDE_FROM
    values = []
    if outside:
        wide = tiles.round_up(d, choice.columns)
        values = [
            part
            for source in sources(s, c * (scale * (x - centre)))
            for part in pairs.split(_padded(source, size, wide), jnp.bfloat16, precision)
        ]

    def program(*refs):
        matrix_refs, refs = refs[: len(matrices)], refs[len(matrices) :]
        value_refs, refs = refs[: len(values)], refs[len(values) :]
        sum_ref, x_ref, s_ref, centre_ref, scale_ref, c_ref, step_ref, out_ref = refs
        i, start = pl.program_id(0) * choice.rows, pl.program_id(1) * choice.columns
        columns = start + jnp.arange(choice.columns)
        rows_at, columns_at = pl.ds(i, choice.rows), pl.ds(start, choice.columns)
        drift = plt.load(c_ref.at[columns_at], mask=columns < d, other=0.0)[None, :]
        inner = dataclasses.replace(choice, rows=choice.depth)

        def turn(t, total):
            at = pl.ds(t * choice.depth, choice.depth)
            if outside:
                loaded = [ref[at, columns_at] for ref in value_refs]
                operands = [loaded[k : k + each] for k in range(0, len(loaded), each)]
            else:
                z = _z(x_ref, centre_ref, scale_ref, t * choice.depth, start, inner)
                score = _masked(s_ref, t * choice.depth, start, inner)
                operands = [pairs.split_tile(v, precision) for v in sources(score, drift * z)]
            for k, operand in enumerate(operands):
                left = [ref[rows_at, at] for ref in matrix_refs[k * each : (k + 1) * each]]
                total += pairs.product(left, operand, (1, 0))
            return total

        zero = jnp.zeros((choice.rows, choice.columns), jnp.float32)
        total = lax.fori_loop(0, size // choice.depth, turn, zero)
        own = _z(x_ref, centre_ref, scale_ref, i, start, choice)
        phi = (total + sum_ref[rows_at][:, None] * drift * own) * (1.0 / n)
        if base:
            phi = _masked(x_ref, i, start, choice) + step_ref[0] * phi
        rows = i + jnp.arange(choice.rows)
        inside = (rows < n)[:, None] & (columns < d)[None, :]
        plt.store(out_ref.at[rows_at, columns_at], phi, mask=inside)

    return pl.pallas_call(
        program,
        grid=(size // choice.rows, -(-d // choice.columns)),
        in_specs=[pl.BlockSpec()] * (len(matrices) + len(values) + len(once)),
        out_specs=pl.BlockSpec(),
        out_shape=jax.ShapeDtypeStruct((n, d), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=choice.warps, num_stages=choice.stages),
        interpret=interpret,
        name=f"svgd_combine_{kernel}",
    )(*matrices, *values, *once)


def _padded(x, rows, columns):
    return jnp.pad(x, ((0, rows - x.shape[0]), (0, columns - x.shape[1])))


def _masked(ref, row, column, choice):
    """A tile of a (N, d) array; zeros beyond its edges."""
    n, d = ref.shape
    inside = (row + jnp.arange(choice.rows) < n)[:, None] & (
        column + jnp.arange(choice.columns) < d
    )[None]
    at = ref.at[pl.ds(row, choice.rows), pl.ds(column, choice.columns)]
    return plt.load(at, mask=inside, other=0.0)


def _z(x_ref, centre_ref, scale_ref, row, column, choice):
    """A tile of scale (x - centre); zeros beyond the edges."""
    n, d = x_ref.shape
    at = pl.ds(column, choice.columns)
    inside = column + jnp.arange(choice.columns) < d
    centre = plt.load(centre_ref.at[at], mask=inside, other=0.0)[None, :]
    scale = plt.load(scale_ref.at[at], mask=inside, other=0.0)[None, :]
    z = (_masked(x_ref, row, column, choice) - centre) * scale
    return jnp.where((row + jnp.arange(choice.rows) < n)[:, None], z, 0.0)
