"""The pairs whose distance an order statistic selected: its gradient, and every distance to check it by.

The gradient of the selected squared distance, the mean over the T pairs that tie, is in particle i

    2/T sum_j a_ij (v_i - v_j) = 2/T (deg_i v_i - sum_j a_ij v_j)        a_ij = 1 where the pair ties, else 0

at v = x: a graph Laplacian, linear in v and symmetric, so it is its own transpose. A program owns
a block of rows, meets the tiles in which the block lies, and multiplies only those that hold a
tie. The distances come from the tiles of the search, to the bit.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_tiles as tiles
from pallas_kernels.triton_rank_bracket import NONE, to_u
from pallas_kernels.triton_rank_plan import plan
from pallas_kernels.triton_rank_state import DIRECT, FIELD
from pallas_kernels.triton_rank_tiles import (
    FAR,
    LEFT,
    RIGHT,
    Distances,
    bits,
    is_pair_of_blocks,
    number,
)


def laplacian(found, v, *, interpret=False, search=None):
    """For each rank, sum_j a_ij (v_i - v_j) of the pairs with its key, and how many there are, twice.

    Args:
      found: what `triton_rank.order_statistics` returned. v: (N, d) float32.
      interpret, search: as there.

    Returns:
      (R, N, d) float32 and (R,) float32, 2 T.
    """
    layout = (search or plan(*v.shape, interpret)).layout
    (n, d), r = v.shape, found.keys.shape[0]
    size, blocks, chunk = layout.size, layout.blocks, layout.chunk
    splits = min(layout.offsets, max(1, -(-2 * tiles.MULTIPROCESSORS // (blocks * layout.chunks))))
    arrays = [a for a in found.operands if a is not None]

    def program(keys_ref, common_ref, v_ref, *refs):
        operand_refs, (out_ref, degrees_ref) = refs[:-2], refs[-2:]
        i, k, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        dimensions = pl.ds(k * chunk, chunk)
        inside_d = k * chunk + jnp.arange(chunk) < d
        keys = [keys_ref[q] for q in range(r)]

        def rows_of(j):
            rows = j * size + jnp.arange(size)
            mask = (rows < n)[:, None] & inside_d[None, :]
            return plt.load(v_ref.at[pl.ds(j * size, size), dimensions], mask=mask, other=0.0)

        def run(direct):
            distances = Distances(layout, operand_refs, common_ref[FIELD], direct)
            count = (layout.offsets - split + splits - 1) // splits

            def turn(t, sums):
                """Adds one tile in which block i is the left block, or the right one."""
                # The same code for both: compiled twice, a tile could have other bits the second time.
                as_left, offset = t < count, split + (t % count) * splits
                j = (i + jnp.where(as_left, offset, blocks - offset)) % blocks
                first, second = jnp.where(as_left, i, j), jnp.where(as_left, j, i)
                visited = is_pair_of_blocks(layout, first, offset)
                rows, inside, far, *rest = distances.block(second, RIGHT)
                right = (rows, inside, jnp.where(visited, far, FAR), *rest)
                distance = distances.tile(distances.block(first, LEFT), right, offset)
                key = jnp.where(distance < FAR, to_u(distance), NONE)
                new = []
                for q in range(r):
                    tied = jnp.where(key == keys[q], 1.0, 0.0)

                    def add(old, tied=tied):
                        total, degrees = old
                        a = jnp.where(as_left, tied, tied.T)
                        for part in _parts(rows_of(j)):
                            total += lax.dot_general(
                                a.astype(jnp.bfloat16),
                                part,
                                (((1,), (0,)), ((), ())),
                                precision=lax.Precision.DEFAULT,
                                preferred_element_type=jnp.float32,
                            )
                        return total, degrees + jnp.sum(a, axis=1)

                    any_tied = jnp.max(jnp.max(tied, axis=1)) > 0
                    new.append(lax.cond(any_tied, add, lambda old: old, sums[q]))
                return new

            zeros = jnp.zeros((size, chunk), jnp.float32), jnp.zeros((size,), jnp.float32)
            sums = lax.fori_loop(0, 2 * count, turn, [zeros] * r)
            mine = rows_of(i)
            for q, (total, degrees) in enumerate(sums):
                at = (split, 0 * i + q, pl.ds(i * size, size))
                plt.store(out_ref.at[(*at, dimensions)], degrees[:, None] * mine - total)
                plt.store(degrees_ref.at[(0 * i + k, *at)], degrees)

        if layout.direct:
            run(True)
            return
        pl.when(common_ref[DIRECT] > 0)(lambda: run(True))
        pl.when(common_ref[DIRECT] == 0)(lambda: run(False))

    name = program.__name__ = "svgd_rank_ties"
    padded, width = blocks * size, layout.chunks * chunk
    out, degrees = pl.pallas_call(
        program,
        grid=(blocks, layout.chunks, splits),
        in_specs=[pl.BlockSpec()] * (3 + len(arrays)),
        out_specs=[pl.BlockSpec()] * 2,
        out_shape=[
            jax.ShapeDtypeStruct((splits, r, padded, width), jnp.float32),
            jax.ShapeDtypeStruct((layout.chunks, splits, r, padded), jnp.float32),
        ],
        compiler_params=plt.CompilerParams(num_warps=layout.warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(found.keys, found.common, v, *arrays)
    return jnp.sum(out, axis=0)[:, :n, :d], jnp.sum(degrees[0], axis=(0, 2))


def pair_keys(found, *, interpret=False, search=None):
    """Integers of all pairs' distances as the search compares them: (blocks, offsets, size, size) int32.

    NONE where a pair does not count. It is O(N^2): for tests.
    """
    layout = (search or plan(*found.operands.x.shape, interpret)).layout
    arrays = [a for a in found.operands if a is not None]

    def program(common_ref, *refs):
        operand_refs, out_ref = refs[:-1], refs[-1]
        i, offset = pl.program_id(0), pl.program_id(1)

        def run(direct):
            distances = Distances(layout, operand_refs, common_ref[FIELD], direct)
            right = distances.block((i + offset) % layout.blocks, RIGHT)
            distance = distances.tile(distances.block(i, LEFT), right, offset)
            counted = (distance < FAR) & is_pair_of_blocks(layout, i, offset)
            key = jnp.where(counted, to_u(distance), NONE)
            whole = pl.ds(0 * i, layout.size)
            plt.store(out_ref.at[i, offset, whole, whole], key)

        if layout.direct:
            run(True)
            return
        pl.when(common_ref[DIRECT] > 0)(lambda: run(True))
        pl.when(common_ref[DIRECT] == 0)(lambda: run(False))

    name = program.__name__ = "svgd_rank_pairs"
    shape = (layout.blocks, layout.offsets, layout.size, layout.size)
    return pl.pallas_call(
        program,
        grid=shape[:2],
        in_specs=[pl.BlockSpec()] * (1 + len(arrays)),
        out_specs=pl.BlockSpec(),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.int32),
        compiler_params=plt.CompilerParams(num_warps=layout.warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(found.common, *arrays)


def _parts(x):
    """Three bfloat16 parts whose sum is x, the smallest first: beside weights of 0 and 1 nothing
    is rounded."""
    found = []
    for _ in range(2):
        high = number(bits(x) & -65536)
        found.append(high.astype(jnp.bfloat16))
        x = x - high
    return [x.astype(jnp.bfloat16), *reversed(found)]
