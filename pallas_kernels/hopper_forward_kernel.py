"""The kernel of the direction on Hopper: wgmma, 16-bit pieces, a warp-specialised pipeline.

Each compute warpgroup owns 64 queries and walks over the keys: one product for the exponent, one for
the sum. wgmma accumulates with truncation, so no accumulator runs for long: every step starts from a fresh
one that is added to float32 registers, or, in many dimensions, a run of steps from one that is added to
the result (one over 65536 keys erred by 2.9e-3, these by 2e-5). Nothing is added atomically: results are
the same bits every time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import hopper_operands as operands
from pallas_kernels.hopper_operands import Layout
from pallas_kernels.hopper_tiles import ForwardTiles

__all__ = ["NAME", "launch", "pallas_modules"]

NAME = "jsvgd_hopper_direction"


def pallas_modules():
    """Pallas and its Mosaic GPU dialect, imported late: older JAX lacks what the kernels use."""
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    return pl, plgpu


def launch(q, k, aq, ak, v, *, layout: Layout, tiles: ForwardTiles, batch: int, steps: int):
    """The kernel: packed operands to sums (splits, rows, width) and row sums (splits, rows).

    Rows of the batch lie one problem after another. With packed operands the row sums are a column of
    the sums, and the second result is not meaningful (zeros).
    """
    pl, plgpu = pallas_modules()
    bq, bk, wgs = tiles.block_q, tiles.block_k, tiles.warpgroups
    chunks, lane, vlane = layout.chunks, layout.lane, layout.value_lane
    rows_q, rows_k = q.shape[0] // batch, k.shape[0] // batch
    norms = not layout.packed
    # Which pieces meet: hi hi, hi lo, lo hi; packed values hold both halves in their columns.
    three = ((0, 0), (0, 1), (1, 0))
    exponent_pieces = three if layout.pieces == 2 else ((0, 0),)
    value_pieces = ((0, 0), (1, 0)) if layout.packed else exponent_pieces
    low = any(i == 1 for i, _ in value_pieces)
    tiling = lambda lane: (plgpu.TilingTransform((8, lane)), plgpu.SwizzleTransform(2 * lane))
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    # What a step brings in, in the order of use: copies wait for their turn in this order.
    order = [("k", i) for i in range(chunks)] + ["a"] * norms + [("v", i) for i in range(chunks)]

    def zeros(shape, array_layout):
        return plgpu.layout_cast(jnp.full(shape, 0, jnp.float32), array_layout)

    def columns(ref, chunk, piece, lane):
        return ref.at[:, pl.ds((chunk * layout.pieces + piece) * lane, lane)]

    def body(q_ref, k_ref, aq_ref, ak_ref, v_ref, o_ref, r_ref, q_s, aq_s, q_bar, aq_bar):
        wg = lax.axis_index("wg")
        part = lax.axis_index("s")
        problem = lax.axis_index("b")
        base = problem * rows_q + lax.axis_index("q") * (bq * wgs) + wg * bq

        def sums(chunk):
            return o_ref.at[part, pl.ds(base, bq), pl.ds(chunk * vlane, vlane)]

        def add(total):
            for chunk, one in enumerate(total):
                before = plgpu.load(sums(chunk), layout=plgpu.Layout.WGMMA, optimized=False)
                sums(chunk)[...] = before + one

        def context(pipeline):
            plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(base, bq)], q_s.at[wg], q_bar.at[wg])
            ai = 0
            if norms:
                plgpu.copy_gmem_to_smem(aq_ref.at[pl.ds(base, bq)], aq_s.at[wg], aq_bar.at[wg])
                plgpu.barrier_wait(aq_bar.at[wg])
                ai = plgpu.load(aq_s.at[wg], layout=row_layout)
            plgpu.barrier_wait(q_bar.at[wg])
            total = tuple(zeros((bq, vlane), plgpu.Layout.WGMMA) for _ in range(chunks))
            carry = {"total": total}
            if tiles.run:
                for chunk in range(chunks):
                    sums(chunk)[...] = total[chunk]
            if norms:
                carry |= {"ai": ai, "weight": zeros((bq,), row_layout)}
            carry = pipeline(carry)
            if tiles.run:
                add(carry["total"])
            else:
                for chunk in range(chunks):
                    sums(chunk)[...] = carry["total"][chunk]
            weight = carry["weight"] if norms else zeros((bq,), row_layout)
            r_ref.at[part, pl.ds(base, bq)][...] = weight

        def weights(e, tensors, ready, done, carry):
            """K of the block from its exponents: in two halves, and its row sums."""
            if norms:
                plgpu.barrier_wait(ready["a"])
                aj = plgpu.load(tensors["a"], layout=plgpu.Layout.WGMMA.reduce(0))
                plgpu.barrier_arrive(done["a"])
                e = e - lax.broadcast_in_dim(carry["ai"], (bq, bk), [0])
                e = e - lax.broadcast_in_dim(aj, (bq, bk), [1])
            # Not clamped at 0: rounding is as small above it as below.
            p = jnp.exp2(e)
            halves = operands.halves(p, tiles.cut_bits) if low else (p.astype(jnp.bfloat16),)
            return halves, (p.sum(axis=1) if norms else None)

        def fresh_sums(p, tensors, ready, done, total):
            """total with p times the values added in registers, chunk by chunk."""
            new = []
            for chunk in range(chunks):

                def second(ref, chunk=chunk):
                    multiply(ref, p, tensors, chunk)
                    return ref[...]

                plgpu.barrier_wait(ready["v", chunk])
                fresh = pl.run_scoped(second, plgpu.ACC((bq, vlane), jnp.float32))
                new.append(total[chunk] + fresh)
                plgpu.barrier_arrive(done["v", chunk])
            return tuple(new)

        def running_sums(p, tensors, ready, done, total, index):
            """total with p times the values added by the products themselves, for a run of steps."""

            def second(refs):
                for chunk, ref in enumerate(refs):
                    multiply(ref, p, tensors, chunk)

            for chunk in range(chunks):
                plgpu.barrier_wait(ready["v", chunk])
            total = pl.run_state(second)(tuple(plgpu.ACC.init(one) for one in total))
            for chunk in range(chunks):
                plgpu.barrier_arrive(done["v", chunk])

            def restart(total):
                add(total)
                # The four warps, apart by their waits for global memory, go on together.
                plgpu.commit_smem()
                return tuple(zeros((bq, vlane), plgpu.Layout.WGMMA) for _ in total)

            ends = lax.rem(jnp.int32(index), jnp.int32(tiles.run)) == tiles.run - 1
            return lax.cond(ends, restart, lambda total: total, total)

        def multiply(ref, p, tensors, chunk):
            for i, j in value_pieces:
                plgpu.wgmma(ref, p[i], columns(tensors["v", chunk], 0, j, vlane))

        def step(indices, *refs):
            count = len(order)
            tensors, ready, done = (
                {name: refs[start + i] for i, name in enumerate(order)}
                for start in (0, count, 2 * count)
            )
            carry = dict(refs[-1])

            # Barriers are waited for before products are issued, never between two of a group.
            def first(ref):
                for chunk in range(chunks):
                    keys = tensors["k", chunk]
                    for i, j in exponent_pieces:
                        own = columns(q_s.at[wg], chunk, i, lane)
                        plgpu.wgmma(ref, own, columns(keys, 0, j, lane).transpose((1, 0)))
                return ref[...]

            for chunk in range(chunks):
                plgpu.barrier_wait(ready["k", chunk])
            e = pl.run_scoped(first, plgpu.ACC((bq, bk), jnp.float32))
            for chunk in range(chunks):
                plgpu.barrier_arrive(done["k", chunk])
            p, p_sum = weights(e, tensors, ready, done, carry)
            if norms:
                carry["weight"] = carry["weight"] + p_sum
            held = p, tensors, ready, done, carry["total"]
            carry["total"] = running_sums(*held, *indices) if tiles.run else fresh_sums(*held)
            return carry

        def block(width, lane, chunk):
            # The contraction of the second product is cut by the swizzle: at most block_k.
            return plgpu.BlockSpec(
                block_shape=(bk, width),
                index_map=lambda i: (i, chunk),
                transforms=tiling(lane),
            )

        swizzle = min(vlane, bk)
        specs = {("k", i): block(layout.pieces * lane, lane, i) for i in range(chunks)}
        specs |= {("v", i): block(layout.pieces * vlane, swizzle, i) for i in range(chunks)}
        specs["a"] = plgpu.BlockSpec(block_shape=(bk,), index_map=lambda i: (i,))
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
            in_specs=[specs[name] for name in order],
        )
        part_rows = pl.ds(problem * rows_k + part * (steps * bk), steps * bk)
        parts = {"k": k_ref.at[part_rows], "v": v_ref.at[part_rows], "a": ak_ref.at[part_rows]}
        pipeline(*[parts[name[0]] for name in order])

    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((tiles.splits, batch * rows_q, layout.width), jnp.float32),
            jax.ShapeDtypeStruct((tiles.splits, batch * rows_q), jnp.float32),
        ],
        scratch_types=[
            plgpu.SMEM((wgs, bq, layout.columns), q.dtype, transforms=tiling(lane)),
            plgpu.SMEM((wgs, bq), jnp.float32),
            plgpu.Barrier(num_barriers=wgs),
            plgpu.Barrier(num_barriers=wgs),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(rows_q // (bq * wgs), tiles.splits, batch),
        grid_names=("q", "s", "b"),
        num_threads=wgs + 1,
        thread_name="wg",
        kernel_name=NAME,
    )(q, k, aq, ak, v)
