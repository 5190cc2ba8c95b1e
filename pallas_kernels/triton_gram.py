"""Portable kernels for few particles in many dimensions: N up to a few thousand, d up to millions.

Rows no longer fit in a tile, so the work is cut along d instead, and the N x N weights are made in between:

    gram      G = Z Z^T,  z = scale (x - centre): a program sums one tile of G over its share of d.
    combine   phi = 1/N [ K s + c (rowsum(W) z - W z) ]: a program makes one tile (rows, columns of d).

Both read x and s as they are, unpadded, centring and scaling on the way, so a direction reads x twice and s
once and writes phi once: the floor of 4 N d numbers. Tiles that hang over an edge are masked.
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
    columns = 64 if rows < 128 else 32
    side = -(-n // rows)
    programs = 4 * tiles.MULTIPROCESSORS if rows <= 64 else 2 * tiles.MULTIPROCESSORS
    shares = max(1, min(programs // (side * (side + 1) // 2), -(-d // (4 * columns))))
    return GramTiles(rows, columns, 4 if rows <= 64 else 8, 3, shares=shares)


def combine_tiles(n):
    """A tile of phi. All rows at once where they fit, so that x and s are read once."""
    rows = min(128, max(16, tiles.next_power_of_two(n)))
    return GramTiles(rows, 128 if rows >= 64 else 256, 4 if rows <= 64 else 8, 2, min(rows, 32))


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

    def program(row_ref, column_ref, x_ref, centre_ref, scale_ref, out_ref):
        t, share = pl.program_id(0), pl.program_id(1)
        tile_rows = [ref[t] * choice.rows for ref in (row_ref, column_ref)]

        def turn(k, total):
            start = (share * turns + k) * choice.columns
            left, right = (
                pairs.split_tile(_z(x_ref, centre_ref, scale_ref, r, start, choice), precision)
                for r in tile_rows
            )
            return total + pairs.product(left, right, (1, 1))

        zero = jnp.zeros((choice.rows, choice.rows), jnp.float32)
        out_ref[0, 0] = lax.fori_loop(0, turns, turn, zero)

    parts = pl.pallas_call(
        program,
        grid=(len(row), choice.shares),
        in_specs=[pl.BlockSpec()] * 5,
        out_specs=pl.BlockSpec((1, 1, choice.rows, choice.rows), lambda t, share: (share, t, 0, 0)),
        out_shape=jax.ShapeDtypeStruct(
            (choice.shares, len(row), choice.rows, choice.rows), jnp.float32
        ),
        compiler_params=plt.CompilerParams(num_warps=choice.warps, num_stages=choice.stages),
        interpret=interpret,
        name="svgd_gram",
    )(jnp.asarray(row, jnp.int32), jnp.asarray(column, jnp.int32), x, centre, scale)
    half = jnp.zeros((side, side, choice.rows, choice.rows), jnp.float32)
    half = half.at[row, column].set(jnp.sum(parts, axis=0))
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
    choice = choice or combine_tiles(n)
    size = tiles.round_up(n, max(choice.rows, choice.depth))
    same = kernel == "rbf"
    matrices = [weights] if same else [weights, slopes]
    matrices = [jnp.pad(a, (0, size - n)) for a in matrices]
    row_sums = jnp.pad(jnp.sum(slopes, axis=1), (0, size - n))
    step = jnp.reshape(jnp.asarray(0.0 if step is None else step, jnp.float32), (1,))

    def program(*refs):
        *matrix_refs, sum_ref, x_ref, s_ref, centre_ref, scale_ref, c_ref, step_ref, out_ref = refs
        i, start = pl.program_id(0) * choice.rows, pl.program_id(1) * choice.columns
        columns = start + jnp.arange(choice.columns)
        drift = plt.load(c_ref.at[pl.ds(start, choice.columns)], mask=columns < d, other=0.0)[
            None, :
        ]
        rows_at, columns_at = pl.ds(i, choice.rows), pl.ds(start, choice.columns)

        inner = dataclasses.replace(choice, rows=choice.depth)

        def turn(t, total):
            j = t * choice.depth
            z = _z(x_ref, centre_ref, scale_ref, j, start, inner)
            score = _masked(s_ref, j, start, inner)
            at = pl.ds(j, choice.depth)
            parts = [pairs.split_tile(ref[rows_at, at], precision) for ref in matrix_refs]
            if same:
                values = pairs.split_tile(score - drift * z, precision)
                return total + pairs.product(parts[0], values, (1, 0))
            total += pairs.product(parts[0], pairs.split_tile(score, precision), (1, 0))
            return total - pairs.product(parts[1], pairs.split_tile(drift * z, precision), (1, 0))

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
        in_specs=[pl.BlockSpec()] * (len(matrices) + 7),
        out_specs=pl.BlockSpec(),
        out_shape=jax.ShapeDtypeStruct((n, d), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=choice.warps, num_stages=choice.stages),
        interpret=interpret,
        name=f"svgd_combine_{kernel}",
    )(*matrices, row_sums, x, s, centre, scale, c, step)


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
