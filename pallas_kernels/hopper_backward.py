"""The fused vector-Jacobian product of the direction on Hopper, queries = particles (JAX >= 0.11).

With y, a and v as in :mod:`pallas_kernels.hopper_forward`, the cotangent g, gn = g / N and
t_i = gn_i . (c z_i):

    K_ij = exp2(y_i . y_j - a_i - a_j),   C_ij = gn_i . v_j + v_i . gn_j,
    W_ij = K_ij (C_ij + t_i + t_j)                                      (symmetric, like K)
    dz_i = (W z)_i - (sum_j W_ij) z_i + c ((sum_j K_ij) gn_i - (K gn)_i),     ds = K gn,
    dc   = sum_i z_i t_i,  t_i = (sum_j K_ij) gn_i - (K gn)_i.

One pass: every block of rows meets all keys once, and no sum crosses blocks, so nothing is added
atomically. Five products of three 16-bit ones each, 2.5 times the forward's work. A warpgroup's products
and elementwise work take turns, and the other warpgroup's fill the gaps: interleaving them within one
was slower (ptxas serializes products when registers that one reads are written while others run).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import hopper_operands as operands
from pallas_kernels import hopper_tiles
from pallas_kernels.hopper_forward import available
from pallas_kernels.hopper_forward_kernel import pallas_modules
from pallas_kernels.hopper_operands import FAR, LOG2E_ROOT, Layout
from pallas_kernels.hopper_tiles import BackwardTiles
from pallas_kernels.stacks import over_stacks

__all__ = ["backward", "supports"]

NAME = "jsvgd_hopper_direction_vjp"

MIN_D = 4
"""With one dimension dz erred by 9e-5: |z| is large beside the bandwidth, and W z cancels."""


def supports(kernel: str, n: int, m: int, d: int, precision: str, dtype) -> tuple[bool, str]:
    """(whether :func:`backward` takes n particles, as many queries, d dimensions; why not)."""
    if d < MIN_D:
        return False, f"d must be at least {MIN_D} (differences cancel against |z| below), got {d}"
    if m != n:
        return False, f"queries must be the particles, got {m} queries of {n} particles"
    return hopper_tiles.check(kernel, n, d, precision, dtype, available()) or hopper_tiles.fits(
        *hopper_tiles.backward_tiles(n, d, precision)
    )


def backward(
    z: Array,
    s: Array,
    c: Array,
    g: Array,
    *,
    kernel: str = "rbf",
    precision: str = "high",
    tiles: tuple[Layout, BackwardTiles] | None = None,
) -> tuple[Array, Array, Array]:
    """Cotangents of forward(z, z, s, c) for the cotangent g of its result, that of c in rows.

    Args:
      z, s, g: float32 (N, d); z standardised and centred, |z|^2 log2(e) / 2 below 6e4.
      c: float32 (d,).
      kernel: "rbf".
      precision: "high" (three 16-bit products each) or "default" (one).
      tiles: layout and tiles instead of the table's, for measurements.

    Returns:
      dz (N, d), ds (N, d) and t (N, d), float32, with dc = sum_i z_i t_i. Batches with ``jax.vmap``.

    Raises:
      ValueError: for what :func:`supports` refuses.
    """
    n, d = z.shape
    ok, reason = supports(kernel, n, n, d, precision, z.dtype)
    if not ok:
        raise ValueError(f"the Hopper backward does not take these arguments: {reason}")
    return _cotangents(precision, tiles)(z, s, c, g)


@functools.cache
def _cotangents(precision: str, plan):
    return over_stacks(functools.partial(_batched, precision=precision, plan=plan))


def _batched(z, s, c, g, *, precision, plan):
    """(B, N, d) arrays and c (B, d) to the three cotangents: pad, pack, launch, finish."""
    b, n, d = z.shape
    layout, tiles = plan or hopper_tiles.backward_tiles(n, d, precision, b)
    rows = math.lcm(tiles.warpgroups * tiles.block_q, tiles.splits * tiles.block_k)
    rows = math.ceil(n / rows) * rows
    steps = rows // (tiles.splits * tiles.block_k)
    drift = c[:, None, :] * z
    gn = g / n
    y = z * LOG2E_ROOT
    pack = functools.partial(
        operands.pack_pair,
        lane=layout.lane,
        chunks=layout.chunks,
        pieces=layout.pieces,
        dtype=jnp.bfloat16,
    )
    packed = [jax.vmap(lambda x: pack(operands.pad_to(x, rows)))(x) for x in (y, s - drift, gn)]
    if tiles.half_exponent:
        pack = functools.partial(pack, dtype=jnp.float16)
        packed.insert(0, jax.vmap(lambda x: pack(operands.pad_to(x, rows)))(y))
    else:
        packed.insert(0, packed[0])
    half = jnp.pad(0.5 * jnp.sum(y * y, -1), [(0, 0), (0, rows - n)], constant_values=FAR)
    own = jnp.pad(jnp.sum(gn * drift, -1), [(0, 0), (0, rows - n)])
    flat = [x.reshape(-1, *x.shape[2:]) for x in (*packed, half, own)]
    sums = launch(*flat, layout=layout, tiles=tiles, batch=b, steps=steps)
    kg, wy, k_sum, w_sum = (x.sum(0).reshape(b, rows, *x.shape[2:])[:, :n] for x in sums)
    kg, wz = kg[..., :d], wy[..., :d] / LOG2E_ROOT
    drag = k_sum[..., None] * gn - kg
    dz = wz - w_sum[..., None] * z + c[:, None, :] * drag
    return dz, kg, drag


def launch(x, y, v, g, half, own, *, layout: Layout, tiles: BackwardTiles, batch: int, steps: int):
    """The kernel: packed operands to K gn, W y (splits, rows, width) and row sums of K and W.

    x is y for the exponent's product (float16 where ``tiles.half_exponent``).
    """
    pl, plgpu = pallas_modules()
    bq, bk, wgs = tiles.block_q, tiles.block_k, tiles.warpgroups
    chunks, lane = layout.chunks, layout.lane
    rows = y.shape[0] // batch
    own_exponent = int(tiles.half_exponent)
    pieces = ((0, 0), (0, 1), (1, 0)) if layout.pieces == 2 else ((0, 0),)
    low = layout.pieces == 2
    transforms = (plgpu.TilingTransform((8, lane)), plgpu.SwizzleTransform(2 * lane))
    row_layout = plgpu.Layout.WGMMA.reduce(1)

    def zeros(shape, array_layout):
        return plgpu.layout_cast(jnp.full(shape, 0, jnp.float32), array_layout)

    def columns(ref, chunk, piece):
        return ref.at[:, pl.ds((chunk * layout.pieces + piece) * lane, lane)]

    def down(vector):
        return lax.broadcast_in_dim(vector, (bq, bk), [0])

    def across(vector):
        return lax.broadcast_in_dim(vector, (bq, bk), [1])

    def halves(t):
        return operands.halves(t, tiles.cut_bits) if low else (t.astype(jnp.bfloat16),)

    def body(x_ref, y_ref, v_ref, g_ref, a_ref, t_ref, kg_ref, wy_ref, ks_ref, ws_ref, *scratch):
        (x_q, v_q, g_q, a_q, t_q), bars = scratch[:5], scratch[5]
        wg = lax.axis_index("wg")
        part = lax.axis_index("s")
        problem = lax.axis_index("b")
        base = problem * rows + lax.axis_index("q") * (bq * wgs) + wg * bq

        def context(pipeline):
            sources = (x_ref, v_ref, g_ref, a_ref, t_ref)
            for i, (source, target) in enumerate(zip(sources, scratch[:5], strict=True)):
                plgpu.copy_gmem_to_smem(
                    source.at[pl.ds(base, bq)], target.at[wg], bars.at[i * wgs + wg]
                )
            for i in range(5):
                plgpu.barrier_wait(bars.at[i * wgs + wg])
            matrices = tuple(zeros((bq, lane), plgpu.Layout.WGMMA) for _ in range(chunks))
            kg, wy, k_sum, w_sum, _, _ = pipeline(
                (
                    matrices,
                    matrices,
                    zeros((bq,), row_layout),
                    zeros((bq,), row_layout),
                    plgpu.load(a_q.at[wg], layout=row_layout),
                    plgpu.load(t_q.at[wg], layout=row_layout),
                )
            )
            own_rows = pl.ds(base, bq)
            for chunk in range(chunks):
                at = (part, own_rows, pl.ds(chunk * lane, lane))
                kg_ref.at[at][...] = kg[chunk]
                wy_ref.at[at][...] = wy[chunk]
            ks_ref.at[part, own_rows][...] = k_sum
            ws_ref.at[part, own_rows][...] = w_sum

        def product(ref, own_q, key, chunk):
            for i, j in pieces:
                own_piece = columns(own_q.at[wg], chunk, i)
                plgpu.wgmma(ref, own_piece, columns(key, 0, j).transpose((1, 0)))

        def arrive(barriers):
            for barrier in barriers:
                plgpu.barrier_arrive(barrier)

        def wait(barriers):
            for barrier in barriers:
                plgpu.barrier_wait(barrier)

        count = tiles.key_operands * chunks + 2

        def grouped(refs):
            x, v, g = (refs[i * chunks : (i + 1) * chunks] for i in range(3))
            return x, v, g, refs[3 * chunks : 3 * chunks + 2], refs[3 * chunks + 2 :] or x

        def step(_, *refs):
            # Operands in the order of their first use: x (if apart from y), v, g, a, t, y.
            x_s, v_s, g_s, vectors, y_s = grouped(refs[:count])
            x_ready, v_ready, g_ready, vectors_ready, y_ready = grouped(refs[count : 2 * count])
            x_done, v_done, g_done, vectors_done, y_done = grouped(refs[2 * count : 3 * count])
            kg, wy, k_sum, w_sum, ai, ti = refs[-1]

            def exponent(ref):
                for i in range(chunks):
                    product(ref, x_q, x_s[i], i)
                return ref[...]

            def cross(ref):
                for i in range(chunks):
                    product(ref, g_q, v_s[i], i)
                    product(ref, v_q, g_s[i], i)
                return ref[...]

            def weighed(weights, key):
                def run(ref):
                    for i, j in pieces:
                        plgpu.wgmma(ref, weights[i], columns(key, 0, j))
                    return ref[...]

                return pl.run_scoped(run, plgpu.ACC((bq, lane), jnp.float32))

            square = plgpu.ACC((bq, bk), jnp.float32)
            wait(x_ready)
            e = pl.run_scoped(exponent, square)
            if own_exponent:
                arrive(x_done)
            wait(vectors_ready)
            aj, tj = (plgpu.load(v, layout=plgpu.Layout.WGMMA.reduce(0)) for v in vectors)
            arrive(vectors_done)
            k = jnp.exp2(e - down(ai) - across(aj))
            wait((*v_ready, *g_ready))
            w = k * (pl.run_scoped(cross, square) + down(ti) + across(tj))
            arrive(v_done)
            k_sum, w_sum = k_sum + k.sum(axis=1), w_sum + w.sum(axis=1)
            weights = halves(k)
            kg = tuple(kg[i] + weighed(weights, g_s[i]) for i in range(chunks))
            arrive(g_done)
            if own_exponent:
                wait(y_ready)
            weights = halves(w)
            wy = tuple(wy[i] + weighed(weights, y_s[i]) for i in range(chunks))
            arrive(y_done)
            return kg, wy, k_sum, w_sum, ai, ti

        def block(chunk):
            return plgpu.BlockSpec(
                block_shape=(bk, layout.pieces * lane),
                index_map=lambda i: (i, chunk),
                transforms=transforms,
            )

        blocks = [block(chunk) for chunk in range(chunks)]
        vector = plgpu.BlockSpec(block_shape=(bk,), index_map=lambda i: (i,))
        pipeline = plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(steps,),
            max_concurrent_steps=min(tiles.stages, steps),
            num_compute_wgs=wgs,
            memory_registers=40,
            wg_axis="wg",
            manual_produced_barriers=True,
            manual_consumed_barriers=True,
            compute_context=context,
            in_specs=[*blocks * 3, vector, vector, *blocks * own_exponent],
        )
        keys = pl.ds(problem * rows + part * (steps * bk), steps * bk)
        first = [ref.at[keys] for ref in (x_ref, v_ref, g_ref) for _ in range(chunks)]
        last = [y_ref.at[keys]] * (chunks * own_exponent)
        pipeline(*first, a_ref.at[keys], t_ref.at[keys], *last)

    matrix = jax.ShapeDtypeStruct((tiles.splits, batch * rows, chunks * lane), jnp.float32)
    vector = jax.ShapeDtypeStruct((tiles.splits, batch * rows), jnp.float32)
    own_matrices = [
        plgpu.SMEM((wgs, bq, layout.columns), t.dtype, transforms=transforms) for t in (x, v, g)
    ]
    own_vector = plgpu.SMEM((wgs, bq), jnp.float32)
    return plgpu.kernel(
        body,
        out_type=[matrix, matrix, vector, vector],
        scratch_types=[*own_matrices, own_vector, own_vector, plgpu.Barrier(num_barriers=5 * wgs)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(rows // (bq * wgs), tiles.splits, batch),
        grid_names=("q", "s", "b"),
        num_threads=wgs + 1,
        thread_name="wg",
        kernel_name=NAME,
    )(x, y, v, g, half, own)
