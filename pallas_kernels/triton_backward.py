"""Portable backward kernels: the vector-Jacobian product of the direction, one pass, rows owned, no atomics.

With gn = g/N, T_ij = w_ij (gn_i . s_j) + f''_ij (c gn_i) . (z_i - z_j) and W = T + T^T,

    dz_i = sum_j W_ij (z_j - z_i) + c t_i,    t_i = sum_j w_ij (gn_i - gn_j),
    ds_i = sum_j K_ij gn_j,                   dc  = sum_i z_i t_i.

For rbf w = f'' = K, so that with v = s - c z and a_i = gn_i . (c z_i):

    W = K (A + A^T),  A_ij = gn_i . v_j + a_i.

dot     five products for rbf (q.k, gn.v, v.gn, W z, K gn), eight for imq, on the matrix units.
direct  differences alone, for small d: exact whatever the offset.
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


def supports(kernel, n, m, d, precision, dtype):
    """Whether `backward` covers a case: (bool, reason); m, the number of queries, must equal n."""
    if m != n:
        return (
            False,
            f"the backward kernels need the queries to be the particles, got m = {m} and n = {n}",
        )
    return tiles.refusal(kernel, n, m, d, precision, dtype, tiles.MAX_DIMENSION_BACKWARD)


def backward(z, s, c, g, *, kernel, precision, interpret=False, family=None, choice=None):
    """Cotangents of `forward(z, z, s, c)`.

    Args:
      z: (N, d) float32 standardised particles. s: (N, d) float32 scores. c: (d,) float32 repulsion/sqrt(h).
      g: (N, d) float32 cotangent of the direction.
      kernel: "rbf" or "imq". precision: "highest", "high" or "default"; the direct family is float32 always.
      interpret: run under the Pallas interpreter.
      family: None (the tile table decides), "direct" (d <= 16) or "dot". choice: a `Tiles`, for tuning.

    Returns:
      dz (N, d), ds (N, d) and t (N, d), float32, with dc = sum_i z_i t_i. dz holds both of z's roles,
      query and particle.

    Raises:
      ValueError: a case that `supports` refuses.
    """
    n, d = z.shape
    covered, reason = supports(kernel, n, n, d, precision, z.dtype)
    if not covered:
        raise ValueError(reason)
    choice = choice or tiles.backward_tiles(kernel, n, d, precision, family)
    tiles.check_family(choice, d)
    size = tiles.round_up(n, max(choice.bm, choice.columns * choice.splits))
    operands, body = (
        (_direct_operands, _direct_body)
        if choice.family == "direct"
        else (_dot_operands, _dot_body)
    )
    arrays, specs, width = operands(z, s, c, g / n, kernel, precision, choice.bm, size)
    program = functools.partial(
        body,
        kernel=kernel, precision=precision, interpret=interpret, choice=choice,
        turns=size // (choice.columns * choice.splits),
    )  # fmt: skip
    program.__name__ = name = f"svgd_backward_{choice.family}_{kernel}"
    out = jax.ShapeDtypeStruct((choice.splits, size, width), z.dtype)
    block = pl.BlockSpec((1, choice.bm, width), lambda i, split: (split, i, 0))
    results = pl.pallas_call(
        program,
        grid=(size // choice.bm, choice.splits),
        in_specs=specs,
        out_specs=[block] * 3,
        out_shape=[out] * 3,
        compiler_params=plt.CompilerParams(num_warps=choice.warps, num_stages=choice.stages),
        interpret=interpret,
        name=name,
    )(*arrays)
    return tuple((x[0] if choice.splits == 1 else jnp.sum(x, axis=0))[:n, :d] for x in results)


def _direct_operands(z, s, c, gn, kernel, precision, bm, size):
    """Component-major operands; the row tiles read the same arrays as the columns."""
    del precision  # float32 multiply-adds whatever was asked for
    d = z.shape[1]
    k = pairs.components(z, size, pairs.FAR)
    s, gn = pairs.components(s, size), pairs.components(gn, size)
    row = pl.BlockSpec((d, bm), lambda i, split: (0, i))
    return [k, s, gn, k, s, gn, c], [row] * 3 + [pl.BlockSpec()] * 4, d


def _direct_body(
    q_ref, si_ref, gi_ref, k_ref, sj_ref, gj_ref, c_ref, dz_ref, ds_ref, t_ref,
    *, kernel, precision, interpret, choice, turns,
):  # fmt: skip
    del precision
    d, (bm, lanes) = q_ref.shape[0], (choice.bm, choice.bn)
    c = [c_ref[x] for x in range(d)]
    q, s, gn = ([ref[x, :][:, None] for x in range(d)] for ref in (q_ref, si_ref, gi_ref))
    cg, minus_c = [c[x] * gn[x] for x in range(d)], [-c[x] for x in range(d)]
    fma = functools.partial(pairs.fma, interpret=interpret)
    dot = functools.partial(pairs.dot, interpret=interpret)
    first = pl.program_id(1) * (turns * choice.columns)

    def step(at, sums):
        position, smooth, slope = sums
        gj = [gj_ref[x, at][None, :] for x in range(d)]
        difference = [q[x] - k_ref[x, at][None, :] for x in range(d)]
        distance = pairs.distance_scale(kernel) * dot(difference, difference)
        f, w, curvature = pairs.profile(kernel, distance, interpret)
        scores = dot(gn + s, [sj_ref[x, at][None, :] for x in range(d)] + gj)
        turned = [fma(minus_c[x], gj[x], cg[x]) for x in range(d)]
        if kernel == "rbf":  # w = f'' = f: one weight
            weight = f * dot(turned, difference, start=scores)
            slope = (slope[0] + f,)
        else:
            weight = fma(w, scores, curvature * dot(turned, difference))
            slope = tuple(fma(w, gn[x] - gj[x], slope[x]) for x in range(d))
        position = tuple(fma(weight, difference[x], position[x]) for x in range(d))
        return position, tuple(fma(f, gj[x], smooth[x]) for x in range(d)), slope

    def turn(t, sums):
        for u in range(choice.unroll):
            sums = step(pl.ds(first + t * choice.columns + u * lanes, lanes), sums)
        return sums

    zero = jnp.zeros((bm, lanes), jnp.float32)
    zeros = (zero,) * d, (zero,) * d, (zero,) * (1 if kernel == "rbf" else d)
    position, smooth, slope = lax.fori_loop(0, turns, turn, zeros)
    for x in range(d):
        ds = jnp.sum(smooth[x], axis=1)
        t = (
            jnp.sum(slope[0], axis=1) * gi_ref[x, :] - ds
            if kernel == "rbf"
            else jnp.sum(slope[x], axis=1)
        )
        dz_ref[0, :, x] = c[x] * t - jnp.sum(position[x], axis=1)
        ds_ref[0, :, x] = ds
        t_ref[0, :, x] = t


def _dot_operands(z, s, c, gn, kernel, precision, bm, size):
    """Row-major operands in parts, d padded to a power of two of at least 16."""
    n, d = z.shape
    width = max(16, tiles.next_power_of_two(d))

    def padded(x):
        return jnp.pad(x, [(0, size - n), (0, width - d)])

    def split(x, dtype=jnp.bfloat16):
        return pairs.split(padded(x), dtype, precision)

    k = split(z * math.sqrt(pairs.distance_scale(kernel)), jnp.float16)
    norms = pairs.column_norms(k, n)
    alignment = pairs.pad_rows(jnp.sum(gn * (c * z), axis=1), size)  # a_i
    parts = [k, split(gn), split(s - c * z if kernel == "rbf" else s), split(z)]
    if kernel != "rbf":
        parts.append(split(c * gn))
    pairwise = [norms, alignment, *(y for x in parts for y in x)]
    once = [padded(z), padded(gn), jnp.pad(c, (0, width - d))]

    def row(x):
        return pl.BlockSpec((bm, *x.shape[1:]), lambda i, split: (i,) + (0,) * (x.ndim - 1))

    specs = [row(x) for x in pairwise] + [pl.BlockSpec()] * len(pairwise)
    specs += [row(once[0]), row(once[1]), pl.BlockSpec()]
    return [*pairwise, *pairwise, *once], specs, width


def _dot_body(*refs, kernel, precision, interpret, choice, turns):
    *pairwise, z_ref, g_ref, c_ref, dz_ref, ds_ref, t_ref = refs
    parts = 2 if precision == "high" else 1
    bm, bn = choice.bm, choice.bn
    first = pl.program_id(1) * (turns * bn)
    half = len(pairwise) // 2

    def take(group, at):
        """Norms, a and the operands in parts, of the row tile or of one column tile."""
        operands = group[2:]
        tuples = [operands[i : i + parts] for i in range(0, len(operands), parts)]
        loaded = [tuple(ref[at, :] for ref in operand) for operand in tuples]
        return group[0][at], group[1][at], loaded

    norm_i, a_i, (q, g_i, s_i, z_i, *cg_i) = take(pairwise[:half], pl.ds(0, bm))
    norm_i, a_i = norm_i[:, None], a_i[:, None]

    def turn(t, carry):
        position, smooth, slope, weights, slopes = carry
        norm_j, a_j, (k, g_j, s_j, z_j, *cg_j) = take(pairwise[half:], pl.ds(first + t * bn, bn))
        f, w, curvature = pairs.profile(
            kernel, pairs.distances(q, k, norm_i, norm_j[None, :], interpret), interpret
        )
        scores = pairs.product(g_i, s_j, (1, 1)) + pairs.product(s_i, g_j, (1, 1))
        repulsion = a_i + a_j[None, :]
        if kernel == "rbf":  # the rest of the repulsion is in v, which stands in for s
            weight = f * (scores + repulsion)
        else:
            cross = pairs.product(cg_i[0], z_j, (1, 1)) + pairs.product(z_i, cg_j[0], (1, 1))
            weight = w * scores + curvature * (repulsion - cross)
            slope = slope + pairs.product(pairs.split_tile(w, precision), g_j, (1, 0))
        position = position + pairs.product(pairs.split_tile(weight, precision), z_j, (1, 0))
        smooth = smooth + pairs.product(pairs.split_tile(f, precision), g_j, (1, 0))
        return (
            position,
            smooth,
            slope,
            weights + jnp.sum(weight, axis=1),
            slopes + jnp.sum(w, axis=1),
        )

    zero, zero_row = jnp.zeros((bm, z_ref.shape[-1]), jnp.float32), jnp.zeros((bm,), jnp.float32)
    carry = (zero, zero, zero if kernel != "rbf" else zero_row, zero_row, zero_row)
    position, smooth, slope, weights, slopes = lax.fori_loop(0, turns, turn, carry)
    t = slopes[:, None] * g_ref[...] - (smooth if kernel == "rbf" else slope)
    dz_ref[0] = position - weights[:, None] * z_ref[...] + c_ref[...][None, :] * t
    ds_ref[0] = smooth
    t_ref[0] = t
