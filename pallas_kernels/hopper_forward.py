"""The fused direction on Hopper: wgmma, 16-bit pieces, a warp-specialised pipeline (JAX >= 0.11).

With standardised particles z, y = z sqrt(log2 e), half norms a = |y|^2 / 2 and v = s - c z:

    K_ij = exp2(min(y_i . y_j - a_i - a_j, 0)),    phi_i = 1/N ( sum_j K_ij v_j + (sum_j K_ij) c z_i ).

Each compute warpgroup owns 64 queries and walks over the keys: one product for the exponent, one for
the sum. wgmma accumulates with truncation, so every step starts from a fresh accumulator that is then
added to float32 registers (one running accumulator over 65536 keys erred by 2.9e-3, this by 4e-5).
Nothing is added atomically: results are the same bits every time.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import hopper_operands as operands
from pallas_kernels import hopper_tiles
from pallas_kernels.hopper_operands import LOG2E_ROOT, Layout
from pallas_kernels.hopper_tiles import ForwardTiles

__all__ = ["available", "forward", "supports"]

NAME = "jsvgd_hopper_direction"


def available() -> tuple[bool, str]:
    """(whether this JAX can build the Hopper kernels, why not)."""
    if jax.__version_info__ < (0, 11):
        return False, f"the Hopper kernels need JAX >= 0.11, got {jax.__version__}"
    return True, ""


def supports(kernel: str, n: int, m: int, d: int, precision: str, dtype) -> tuple[bool, str]:
    """(whether :func:`forward` takes n keys, m queries, d dimensions; why not). Compiles nothing."""
    return hopper_tiles.check(kernel, n, d, precision, dtype, available()) or hopper_tiles.fits(
        *hopper_tiles.forward_tiles(n, m, d, precision)
    )


def forward(
    zq: Array,
    zk: Array,
    s: Array,
    c: Array,
    *,
    kernel: str = "rbf",
    precision: str = "high",
    base: Array | None = None,
    scale: Array | float | None = None,
    tiles: tuple[Layout, ForwardTiles] | None = None,
) -> Array:
    """phi at the queries zq (M, d) for standardised particles zk (N, d), scores s (N, d), c (d,).

    Args:
      zq, zk, s: float32; |z|^2 log2(e) / 2 must stay below 6e4 (float16 exponents).
      c: repulsion / sqrt(bandwidth) of each dimension, float32 (d,).
      kernel: "rbf".
      precision: "high" (three 16-bit products each way) or "default" (one).
      base, scale: when given, the result is base + scale * phi.
      tiles: layout and tiles instead of the table's, for measurements.

    Returns:
      float32 (M, d). Batches with ``jax.vmap``; reverse mode is the caller's.

    Raises:
      ValueError: for what :func:`supports` refuses.
    """
    (m, d), n = zq.shape, zk.shape[0]
    ok, reason = supports(kernel, n, m, d, precision, zq.dtype)
    if not ok:
        raise ValueError(f"the Hopper direction does not take these arguments: {reason}")
    phi = _direction(precision, tiles)(zq, zk, s, c)
    return phi if base is None else base + scale * phi


@functools.lru_cache(maxsize=None)
def _direction(precision: str, plan):
    return over_stacks(functools.partial(_batched, precision=precision, plan=plan))


def over_stacks(batched):
    """A function of one problem from one of a stack; its vmap, however deep, is one call of the latter.

    ``plgpu.kernel`` has a vmap of its own, which would hide the batch from the choice of tiles.
    """

    @jax.custom_batching.custom_vmap
    def stacked(*arrays):
        return batched(*arrays)

    @stacked.def_vmap
    def _(axis_size, in_batched, *arrays):
        full = _with_axis(axis_size, in_batched, arrays)
        out = stacked(*[x.reshape(-1, *x.shape[2:]) for x in full])
        split = lambda x: x.reshape(axis_size, -1, *x.shape[1:])
        return jax.tree.map(split, out), jax.tree.map(lambda _: True, out)

    @jax.custom_batching.custom_vmap
    def single(*arrays):
        return jax.tree.map(lambda x: x[0], batched(*[x[None] for x in arrays]))

    @single.def_vmap
    def _(axis_size, in_batched, *arrays):
        out = stacked(*_with_axis(axis_size, in_batched, arrays))
        return out, jax.tree.map(lambda _: True, out)

    return single


def _with_axis(axis_size, in_batched, arrays):
    return [
        x if b else jnp.broadcast_to(x, (axis_size, *x.shape))
        for x, b in zip(arrays, in_batched, strict=True)
    ]


def _batched(zq, zk, s, c, *, precision, plan):
    """(B, M, d), (B, N, d), (B, N, d), (B, d) to phi (B, M, d): pad, pack, launch, finish."""
    (b, m, d), n = zq.shape, zk.shape[1]
    layout, tiles = plan or hopper_tiles.forward_tiles(n, m, d, precision, b)
    rows = tiles.warpgroups * tiles.block_q
    rows_q = math.ceil(m / rows) * rows
    steps = math.ceil(math.ceil(n / tiles.block_k) / tiles.splits)
    rows_k = steps * tiles.splits * tiles.block_k
    drift = c[:, None, :] * zk
    exponents = jax.vmap(
        functools.partial(
            operands.exponent_operands, layout=layout, rows_q=rows_q, rows_k=rows_k
        )
    )(zq * LOG2E_ROOT, zk * LOG2E_ROOT)
    values = jax.vmap(functools.partial(operands.value_operand, layout=layout, rows=rows_k))(
        s - drift
    )
    flat = [x.reshape(-1, *x.shape[2:]) for x in (*exponents, values)]
    total, weight = launch(*flat, layout=layout, tiles=tiles, batch=b, steps=steps)
    total = total.sum(0).reshape(b, rows_q, -1)[:, :m]
    if layout.packed:
        weight = total[..., 0]
        total = total[..., 1 : 3 * d + 1].reshape(b, m, 3, d).sum(2)
    else:
        weight = weight.sum(0).reshape(b, rows_q)[:, :m]
        total = total[..., :d]
    return (total + weight[..., None] * (c[:, None, :] * zq)) / n


def launch(q, k, aq, ak, v, *, layout: Layout, tiles: ForwardTiles, batch: int, steps: int):
    """The kernel: packed operands to sums (splits, rows, width) and row sums (splits, rows).

    Rows of the batch lie one problem after another. With packed operands the row sums are a column of
    the sums, and the second result is not meaningful (zeros).
    """
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

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
    overlap = tiles.overlap

    def zeros(shape, array_layout, dtype=jnp.float32):
        return plgpu.layout_cast(jnp.full(shape, 0, dtype), array_layout)

    def columns(ref, chunk, piece, lane):
        return ref.at[:, pl.ds((chunk * layout.pieces + piece) * lane, lane)]

    def body(q_ref, k_ref, aq_ref, ak_ref, v_ref, o_ref, r_ref, q_s, aq_s, q_bar, aq_bar):
        wg = lax.axis_index("wg")
        part = lax.axis_index("s")
        problem = lax.axis_index("b")
        base = problem * rows_q + lax.axis_index("q") * (bq * wgs) + wg * bq

        def context(pipeline):
            plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(base, bq)], q_s.at[wg], q_bar.at[wg])
            ai = 0
            if norms:
                plgpu.copy_gmem_to_smem(aq_ref.at[pl.ds(base, bq)], aq_s.at[wg], aq_bar.at[wg])
                plgpu.barrier_wait(aq_bar.at[wg])
                ai = plgpu.load(aq_s.at[wg], layout=row_layout)
            plgpu.barrier_wait(q_bar.at[wg])
            total = tuple(zeros((bq, vlane), plgpu.Layout.WGMMA) for _ in range(chunks))
            carry = dict(total=total)
            if norms:
                carry |= dict(ai=ai, weight=zeros((bq,), row_layout))
            if tiles.q_in_registers:
                carry["q"] = tuple(
                    plgpu.load(columns(q_s.at[wg], 0, i, lane), layout=plgpu.Layout.WGMMA)
                    for i in range(layout.pieces)
                )
            if overlap:
                blank = zeros((bq, bk), plgpu.Layout.WGMMA, jnp.bfloat16)
                carry["p"] = (blank, blank) if low else (blank,)
                if norms:
                    carry["p_sum"] = zeros((bq,), row_layout)
            carry = pipeline(carry)
            for chunk in range(chunks):
                o_ref.at[part, pl.ds(base, bq), pl.ds(chunk * vlane, vlane)][...] = carry["total"][
                    chunk
                ]
            weight = carry["weight"] if norms else zeros((bq,), row_layout)
            r_ref.at[part, pl.ds(base, bq)][...] = weight

        def exponent(ref, k_s, carry):
            for chunk in range(chunks):
                for i, j in exponent_pieces:
                    a = carry["q"][i] if "q" in carry else columns(q_s.at[wg], chunk, i, lane)
                    plgpu.wgmma(ref, a, columns(k_s[chunk], chunk=0, piece=j, lane=lane).transpose((1, 0)))

        def weights(e, ak_s, carry):
            """K of the block from its exponents: in two halves, and its row sums."""
            if norms:
                aj = plgpu.load(ak_s, layout=plgpu.Layout.WGMMA.reduce(0))
                e = e - lax.broadcast_in_dim(carry["ai"], (bq, bk), [0])
                e = e - lax.broadcast_in_dim(aj, (bq, bk), [1])
            p = jnp.exp2(jnp.minimum(e, 0.0))
            hi = p.astype(jnp.bfloat16)
            halves = (hi, (p - hi.astype(jnp.float32)).astype(jnp.bfloat16)) if low else (hi,)
            return halves, (p.sum(axis=1) if norms else None)

        def weigh(ref, halves, v_s):
            for i, j in value_pieces:
                plgpu.wgmma(ref, halves[i], columns(v_s, 0, j, vlane))

        def step(_, *refs):
            count = 2 * chunks + norms
            tensors, ready, done = (refs[i * count : (i + 1) * count] for i in range(3))
            carry = dict(refs[-1])
            k_s, v_s = tensors[:chunks], tensors[chunks + norms :]
            ak_s = tensors[chunks] if norms else None
            v_ready, v_done = ready[chunks + norms :], done[chunks + norms :]
            for barrier in ready[: chunks + norms]:
                plgpu.barrier_wait(barrier)
            if overlap:
                return overlapped(k_s, v_s, ak_s, v_ready, done, carry)

            def first(ref):
                exponent(ref, k_s, carry)
                return ref[...]

            e = pl.run_scoped(first, plgpu.ACC((bq, bk), jnp.float32))
            for barrier in done[:chunks]:
                plgpu.barrier_arrive(barrier)
            halves, p_sum = weights(e, ak_s, carry)
            if norms:
                plgpu.barrier_arrive(done[chunks])
                carry["weight"] = carry["weight"] + p_sum
            total = []
            for chunk in range(chunks):
                plgpu.barrier_wait(v_ready[chunk])

                def second(ref, chunk=chunk):
                    weigh(ref, halves, v_s[chunk])
                    return ref[...]

                fresh = pl.run_scoped(second, plgpu.ACC((bq, vlane), jnp.float32))
                total.append(carry["total"][chunk] + fresh)
                plgpu.barrier_arrive(v_done[chunk])
            carry["total"] = tuple(total)
            return carry

        def overlapped(k_s, v_s, ak_s, v_ready, done, carry):
            """The exponents of this block of keys beside the sum over the block before."""
            if norms:
                carry["weight"] = carry["weight"] + carry["p_sum"]

            def both(e_ref, *sums):
                exponent(e_ref, k_s, carry)
                for chunk in range(chunks):
                    plgpu.barrier_wait(v_ready[chunk])
                    weigh(sums[chunk], carry["p"], v_s[chunk])
                e = plgpu.wgmma_accumulator_load(e_ref, wait_n=chunks * len(value_pieces))
                for barrier in done[:chunks]:
                    plgpu.barrier_arrive(barrier)
                halves, p_sum = weights(e, ak_s, carry)
                if norms:
                    plgpu.barrier_arrive(done[chunks])
                plgpu.wgmma_wait(0)
                return halves, p_sum, [ref[...] for ref in sums]

            halves, p_sum, fresh = pl.run_scoped(
                both,
                plgpu.ACC((bq, bk), jnp.float32),
                *(plgpu.ACC((bq, vlane), jnp.float32) for _ in range(chunks)),
            )
            for barrier in done[chunks + norms :]:
                plgpu.barrier_arrive(barrier)
            carry["total"] = tuple(a + b for a, b in zip(carry["total"], fresh, strict=True))
            carry["p"] = halves
            if norms:
                carry["p_sum"] = p_sum
            return carry

        # Overlapped, the values lag one step behind the keys; the last step's keys are not used.
        here = (lambda i: jnp.minimum(i, steps - 1)) if overlap else (lambda i: i)
        before = (lambda i: jnp.maximum(i - 1, 0)) if overlap else (lambda i: i)

        def block(width, lane, chunk, row):
            # The contraction of the second product is cut by the swizzle: at most block_k.
            return plgpu.BlockSpec(
                block_shape=(bk, width),
                index_map=lambda i: (row(i), chunk),
                transforms=tiling(lane),
            )

        key_width, value_width = layout.pieces * lane, layout.pieces * vlane
        keys = [block(key_width, lane, chunk, here) for chunk in range(chunks)]
        swizzle = min(vlane, bk)
        values = [block(value_width, swizzle, chunk, before) for chunk in range(chunks)]
        half_norms = [plgpu.BlockSpec(block_shape=(bk,), index_map=lambda i: (here(i),))] * norms
        pipeline = plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(steps + overlap,),
            max_concurrent_steps=min(tiles.stages, steps + overlap),
            num_compute_wgs=wgs,
            memory_registers=40,
            wg_axis="wg",
            manual_produced_barriers=True,
            manual_consumed_barriers=True,
            compute_context=context,
            in_specs=[*keys, *half_norms, *values],
        )
        part_rows = pl.ds(problem * rows_k + part * (steps * bk), steps * bk)
        k_part, v_part = k_ref.at[part_rows], v_ref.at[part_rows]
        pipeline(*[k_part] * chunks, *[ak_ref.at[part_rows]] * norms, *[v_part] * chunks)

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
