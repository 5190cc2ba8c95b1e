"""Portable forward kernels: the direction phi in one pass over all pairs, no N x M array.

    phi_i = 1/N sum_j [ K_ij s_j + w_ij c (zq_i - zk_j) ],   K = f(|zq_i - zk_j|^2/2), w = -f'

`pl.pallas_call` with Triton's compiler parameters: Ampere and newer GPUs, and any machine under the Pallas
interpreter. A program owns a tile of rows i and walks over the columns j of its split.

dot     distances from q.k on the matrix units, then the sum over j as a second product:
        rbf  phi = K (s - c z) + rowsum(K) c z_i;    imq  phi = K s - w (c z) + rowsum(w) c z_i.
direct  no products: a warp owns whole rows, a lane one column, and each lane keeps its own sums until the
        end. rbf tiles whose rows all lie near the centre expand the square and pull the row's factor out of
        the exponential, K_ij = 2^(2 q.k - |k|^2) 2^(-|q|^2): 2 d + 2 instructions a pair. All other
        tiles take differences, which are exact whatever the offset.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_pairs as pairs
from pallas_kernels import triton_tiles as tiles

NEAR = 64.0  # |z|^2 log2(e)/2 up to which the expanded square keeps 1e-5 of K and its sums stay below 2^127


def supports(kernel, n, m, d, precision, dtype):
    """Whether `forward` covers a case: (bool, reason); reason is "" when it does.

    Args:
      kernel: "rbf" or "imq". n, m, d: particles, queries, dimensions. precision: "highest", "high",
        "default". dtype: of the particles.
    """
    return tiles.refusal(kernel, n, m, d, precision, dtype, tiles.MAX_DIMENSION)


def forward(
    zq,
    zk,
    s,
    c,
    *,
    kernel,
    precision,
    base=None,
    scale=None,
    interpret=False,
    family=None,
    choice=None,
):
    """Direction at the queries, or base + scale * direction.

    Args:
      zq: (M, d) float32 standardised queries. zk: (N, d) float32 standardised particles.
      s: (N, d) float32 scores. c: (d,) float32 repulsion/sqrt(h).
      kernel: "rbf" or "imq". precision: "highest", "high" or "default"; the direct family is float32 always.
      base: (M, d) float32 or None. scale: float32 scalar or None; both or neither.
      interpret: run under the Pallas interpreter.
      family: None (the tile table decides), "direct" (d <= 16) or "dot". choice: a `Tiles`, for tuning.

    Returns:
      (M, d) float32.

    Raises:
      ValueError: a case that `supports` refuses, or base without scale.
    """
    m, d = zq.shape
    n = zk.shape[0]
    covered, reason = supports(kernel, n, m, d, precision, zq.dtype)
    if not covered:
        raise ValueError(reason)
    if (base is None) != (scale is None):
        raise ValueError("base and scale come together: got one of them")
    choice = choice or tiles.forward_tiles(kernel, n, m, d, precision, family)
    tiles.check_family(choice, d)
    rows = tiles.round_up(m, choice.bm)
    columns = tiles.round_up(n, choice.columns * choice.splits)
    operands, body = (
        (_direct_operands, _direct_body)
        if choice.family == "direct"
        else (_dot_operands, _dot_body)
    )
    arrays, specs, width = operands(zq, zk, s, c, kernel, precision, choice.bm, rows, columns)
    fused = base is not None and choice.splits == 1
    if fused:
        base_columns = jnp.pad(base, [(0, rows - m), (0, width - d)])
        arrays += [base_columns, jnp.reshape(scale, (1,)).astype(zq.dtype)]
        specs += [pl.BlockSpec((choice.bm, width), lambda i, split: (i, 0)), pl.BlockSpec()]
    program = functools.partial(
        body,
        kernel=kernel, precision=precision, interpret=interpret, choice=choice, particles=n,
        turns=columns // (choice.columns * choice.splits), fused=fused,
    )  # fmt: skip
    program.__name__ = name = f"svgd_forward_{choice.family}_{kernel}"
    out = pl.pallas_call(
        program,
        grid=(rows // choice.bm, choice.splits),
        in_specs=specs,
        out_specs=pl.BlockSpec((1, choice.bm, width), lambda i, split: (split, i, 0)),
        out_shape=jax.ShapeDtypeStruct((choice.splits, rows, width), zq.dtype),
        compiler_params=plt.CompilerParams(num_warps=choice.warps, num_stages=choice.stages),
        interpret=interpret,
        name=name,
    )(*arrays)
    phi = (out[0] if choice.splits == 1 else jnp.sum(out, axis=0))[:m, :d]
    return phi if fused or base is None else base + scale * phi


def _row_block(bm, *trailing):
    """Block of a (rows, *trailing) array that follows the row tile."""
    return pl.BlockSpec((bm, *trailing), lambda i, split: (i,) + (0,) * len(trailing))


def _direct_operands(zq, zk, s, c, kernel, precision, bm, rows, columns):
    """Component-major operands, so that a warp reads a component of its columns in one line."""
    del precision  # float32 multiply-adds whatever was asked for
    d = zq.shape[1]
    k, score = pairs.components(zk, columns, pairs.FAR), pairs.components(s, columns)
    arrays = [pairs.components(zq, rows), k, score, c]
    specs = [pl.BlockSpec((d, bm), lambda i, split: (0, i))] + [pl.BlockSpec()] * 3
    if kernel == "rbf" and d <= tiles.NEAR_LIMIT:
        # sums over components written out: XLA then makes all of these in one elementwise kernel
        norm = pairs.distance_scale(kernel) * sum(k[x] * k[x] for x in range(d))
        arrays += [score - c[:, None] * k, norm]  # FAR beside a weight of 0 adds 0
        specs += [pl.BlockSpec(), pl.BlockSpec()]
    return arrays, specs, d


def _direct_body(
    q_ref, k_ref, s_ref, c_ref, *refs, kernel, precision, interpret, choice, particles, turns, fused
):
    del precision
    d, (bm, lanes) = q_ref.shape[0], (choice.bm, choice.bn)
    scale = pairs.distance_scale(kernel)
    *key_refs, out_ref = refs[:-3] + refs[-1:] if fused else refs
    fma = functools.partial(pairs.fma, interpret=interpret)
    q = [q_ref[x, :][:, None] for x in range(d)]
    c = [c_ref[x] for x in range(d)]
    first = pl.program_id(1) * (turns * choice.columns)
    zero = jnp.zeros((bm, lanes), jnp.float32)

    def walk(step, count):
        """Sums of `count` tiles over this split's columns, then over the lanes."""

        def turn(t, sums):
            for u in range(choice.unroll):
                sums = step(pl.ds(first + t * choice.columns + u * lanes, lanes), sums)
            return sums

        return [jnp.sum(x, axis=1) for x in lax.fori_loop(0, turns, turn, (zero,) * count)]

    def apart():
        """Differences: exact whatever the offset."""

        def step(at, sums):
            difference = [q[x] - k_ref[x, at][None, :] for x in range(d)]
            score = [s_ref[x, at][None, :] for x in range(d)]
            distance = scale * pairs.dot(difference, difference, interpret)
            f, w, _ = pairs.profile(kernel, distance, interpret)
            if kernel == "rbf":  # w = f: one weight for both terms
                score = [fma(c[x], difference[x], score[x]) for x in range(d)]
                return tuple(fma(f, score[x], sums[x]) for x in range(d))
            attract = [fma(f, score[x], sums[x]) for x in range(d)]
            return tuple(attract + [fma(w, difference[x], sums[d + x]) for x in range(d)])

        sums = walk(step, d if kernel == "rbf" else 2 * d)
        return sums if kernel == "rbf" else [sums[x] + c[x] * sums[d + x] for x in range(d)]

    def near():
        """Expanded squares, the factor of the row taken out of the exponential."""
        v_ref, norm_ref = key_refs
        doubled = [2.0 * scale * x for x in q]

        def step(at, sums):
            k = [k_ref[x, at][None, :] for x in range(d)]
            exponent = pairs.dot(doubled, k, interpret, start=-norm_ref[at][None, :])
            f = pairs.exp2(exponent, interpret)
            attract = [fma(f, v_ref[x, at][None, :], sums[x]) for x in range(d)]
            return (*attract, sums[d] + f)

        *sums, total = walk(step, d + 1)
        factor = pairs.exp2(-norm, interpret)
        return [factor * (sums[x] + total * c[x] * q_ref[x, :]) for x in range(d)]

    if kernel == "rbf" and d <= tiles.NEAR_LIMIT:
        norm = scale * sum(q_ref[x, :] * q_ref[x, :] for x in range(d))
        phi = lax.cond(jnp.max(norm) <= NEAR, near, apart)
    else:
        phi = apart()
    for x in range(d):
        y = phi[x] * (1.0 / particles)
        out_ref[0, :, x] = refs[-3][:, x] + refs[-2][0] * y if fused else y


def _dot_operands(zq, zk, s, c, kernel, precision, bm, rows, columns):
    """Row-major operands in parts, d padded to a power of two of at least 16."""
    d = zq.shape[1]
    width = max(16, tiles.next_power_of_two(d))

    def padded(x, count):
        return jnp.pad(x, [(0, count - x.shape[0]), (0, width - d)])

    scale = math.sqrt(pairs.distance_scale(kernel))
    q, k = padded(zq * scale, rows), padded(zk * scale, columns)
    q_parts = pairs.split(q, jnp.float16, precision)
    k_parts = pairs.split(k, jnp.float16, precision)
    values = [s - c * zk] if kernel == "rbf" else [s, -c * zk]
    value_parts = [
        y for x in values for y in pairs.split(padded(x, columns), jnp.bfloat16, precision)
    ]
    norms = pairs.column_norms(k_parts, zk.shape[0])
    tile = _row_block(bm, width)
    arrays = [*q_parts, pairs.norms(q_parts), padded(c * zq, rows), norms, *k_parts, *value_parts]
    specs = [tile] * len(q_parts) + [_row_block(bm), tile]
    specs += [pl.BlockSpec()] * (1 + len(k_parts) + len(value_parts))
    return arrays, specs, width


def _dot_body(*refs, kernel, precision, interpret, choice, particles, turns, fused):
    parts = 2 if precision == "high" else 1
    out_ref = refs[-1]
    q = tuple(r[...] for r in refs[:parts])
    q_norm = refs[parts][...][:, None]
    repulsion_ref, norm_ref = refs[parts + 1 : parts + 3]
    k_refs = refs[parts + 3 : 2 * parts + 3]
    value_refs = refs[2 * parts + 3 : 3 * parts + 3]
    slope_refs = refs[3 * parts + 3 : 4 * parts + 3]  # used by imq alone
    bm, bn = choice.bm, choice.bn
    first = pl.program_id(1) * (turns * bn)

    def turn(t, carry):
        acc, total = carry
        at = pl.ds(first + t * bn, bn)
        k = tuple(r[at, :] for r in k_refs)
        distance = pairs.distances(q, k, q_norm, norm_ref[at][None, :], interpret)
        f, w, _ = pairs.profile(kernel, distance, interpret)
        total = total + jnp.sum(w, axis=1)
        values = tuple(r[at, :] for r in value_refs)
        acc = acc + pairs.product(pairs.split_tile(f, precision), values, (1, 0))
        if kernel != "rbf":
            slopes = tuple(r[at, :] for r in slope_refs)
            acc = acc + pairs.product(pairs.split_tile(w, precision), slopes, (1, 0))
        return acc, total

    zeros = jnp.zeros((bm, out_ref.shape[-1]), jnp.float32), jnp.zeros((bm,), jnp.float32)
    acc, total = lax.fori_loop(0, turns, turn, zeros)
    phi = (acc + total[:, None] * repulsion_ref[...]) * (1.0 / particles)
    out_ref[0] = refs[-3][...] + refs[-2][0] * phi if fused else phi
