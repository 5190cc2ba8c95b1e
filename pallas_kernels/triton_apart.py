"""Exact differences for particles far apart, behind a flag that the device reads.

The other kernels expand |x - y|^2 into products, which lose their digits once particles lie far from
their centre in units of the bandwidth. The kernels here take differences of the raw particles first and
scale second, so near pairs of a far cluster keep every digit. They overwrite the others' results in place
where the flag is set and return at once where it is not: that costs one short launch, while a
conditional outside of kernels makes the host wait for the device in every call.

`triton_flag` has the walk over rows and columns. Speed does not matter here, answers do: about N^2 d
elementwise steps.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_pairs as pairs
from pallas_kernels import triton_tiles as tiles
from pallas_kernels.triton_flag import View, behind_flag, columns, loop, overwrite, walk, width

PARTS = 8192  # elements of parts that a program adds: 64 a thread
MOST_ROWS = 64  # of parts to a program: where particles are far it takes them one by one
CHUNK = 128  # dimensions a program holds where it does not hold whole rows


def forward(phi, far, q, x, s, scale, c, *, kernel, base=None, step=None, interpret=False):
    """phi, or the direction (base + step * direction) by differences where far is set.

    Args:
      phi: (M, d) float32, what other kernels made of the same arguments; overwritten where far.
      far: bool or integer flags, a scalar or (P,): whether any is set decides.
      q: (M, d) float32 raw queries. x, s: (N, d) float32 raw particles and scores, d <= 256.
      scale, c: (d,) float32, 1/sqrt(h) and repulsion/sqrt(h).
      kernel: "rbf" or "imq".
      base: (M, d) float32 or None. step: float32 scalar or None; both or neither.
    """
    more = [] if base is None else [base, _one(step)]
    row = _forward_row(x.shape, kernel, interpret)
    name = f"svgd_apart_forward_{kernel}"
    return overwrite(row, [phi], far, [q, x, s, scale, c, *more], q.shape[0], name, interpret)[0]


def assemble(parts, far, q, x, s, scale, c, *, kernel, base=None, step=None, interpret=False):
    """The sum of the parts (base + step * sum), or the direction by differences where far is set.

    Args:
      parts: (P, M, d) float32. The rest as in `forward`.
    """
    count, m, d = parts.shape
    size = min(MOST_ROWS, max(1, PARTS // (tiles.next_power_of_two(count) * width(d))))

    def added(block, refs, out_refs):
        part_ref, base_refs = refs[-1], refs[5:-1]
        view = View(d, 0 * block, width(d))
        rows, inside = columns(block, size, m)
        at = pl.ds(0 * block, tiles.next_power_of_two(count))
        mask = inside[None, :, None] & view.inside[None, None, :]
        mask &= (0 * block + jnp.arange(at.size) < count)[:, None, None]
        y = jnp.sum(plt.load(part_ref.at[at, rows, view.at], mask=mask, other=0.0), axis=0)
        mask = inside[:, None] & view.inside[None, :]
        if base_refs:
            y = view.tile(base_refs[0], rows, inside) + base_refs[1][0] * y
        plt.store(out_refs[0].at[rows, view.at], y, mask=mask)

    more = [] if base is None else [base, _one(step)]
    row = _forward_row(x.shape, kernel, interpret)
    return behind_flag(
        lambda i, refs, out_refs: row(i, refs[:-1], out_refs),
        added,
        far,
        [q, x, s, scale, c, *more, parts],
        [jax.ShapeDtypeStruct((m, d), jnp.float32)],
        rows=m,
        programs=-(-m // size),
        name=f"svgd_apart_assemble_{kernel}",
        interpret=interpret,
    )[0]


def _forward_row(shape, kernel, interpret):
    """One row of `forward`, from refs of q, x, s, scale, c and, if given, base and step."""
    n, d = shape

    def row(i, refs, out_refs):
        q_ref, x_ref, s_ref, scale_ref, c_ref, *base_refs = refs
        view = View(d, 0 * i, width(d))
        q_i, scale_, c_ = view.load(q_ref, i), view.load(scale_ref), view.load(c_ref)

        def tile(at, inside, total):
            difference = scale_ * (q_i - view.tile(x_ref, at, inside))
            f, w, _ = _profile(kernel, _half_squared(difference), inside, interpret)
            score = view.tile(s_ref, at, inside)
            return total + jnp.sum(f[:, None] * score + w[:, None] * (c_ * difference), axis=0)

        y = walk(n, view.width, tile, jnp.zeros((view.width,), jnp.float32)) * (1.0 / n)
        if base_refs:
            y = view.load(base_refs[0], i) + base_refs[1][0] * y
        view.store(out_refs[0], i, y)

    return row


def backward(near, far, x, s, scale, c, g, *, kernel, interpret=False):
    """Cotangents of `forward(z, z, ...)` by differences where far is set, else near.

    Args:
      near: (dz, ds, dc, dl), four (N, d) float32 arrays: the cotangents of the standardised particles
        and of the scores, and rows whose sums are those of c and of log(scale) at a fixed c.
      far, x, s, scale, c, kernel: as in `forward`, d <= 256. g: (N, d) float32 cotangent of phi.

    Returns:
      The four arrays, overwritten where far.
    """
    n, d = x.shape

    def row(i, refs, out_refs):
        x_ref, s_ref, g_ref, scale_ref, c_ref = refs
        view = View(d, 0 * i, width(d))
        x_i, s_i, g_i = (view.load(ref, i) for ref in (x_ref, s_ref, g_ref))
        scale_, c_ = view.load(scale_ref), view.load(c_ref)

        def tile(at, inside, sums):
            position, smooth, exchange, push, spread = sums
            x_j, s_j, g_j = (view.tile(ref, at, inside) for ref in (x_ref, s_ref, g_ref))
            difference = scale_ * (x_i - x_j)
            f, w, curvature = _profile(kernel, _half_squared(difference), inside, interpret)
            drive = jnp.sum(g_i * s_j + s_i * g_j, axis=1)
            turned = jnp.sum(c_ * (g_i - g_j) * difference, axis=1)
            weight = (w * drive + curvature * turned)[:, None]
            f, w = f[:, None], w[:, None]
            return (
                position + jnp.sum(weight * difference, axis=0),
                smooth + jnp.sum(f * g_j, axis=0),
                exchange + jnp.sum(w * (g_i - g_j), axis=0),
                push + jnp.sum(w * difference, axis=0),
                spread + jnp.sum(weight * (difference * difference), axis=0),
            )

        zero = jnp.zeros((view.width,), jnp.float32)
        sums = walk(n, view.width, tile, (zero,) * 5)
        position, smooth, exchange, push, spread = (x * (1.0 / n) for x in sums)
        d_drift = g_i * push
        rows = c_ * exchange - position, smooth, d_drift, c_ * d_drift - 0.5 * spread
        for ref, value in zip(out_refs, rows, strict=True):
            view.store(ref, i, value)

    name = f"svgd_apart_backward_{kernel}"
    return overwrite(row, list(near), far, [x, s, g, scale, c], n, name, interpret)


def half_squared_distances(u, far, x, scale, *, interpret=False):
    """u (N, N), or sum_c (scale_c (x_ic - x_jc))^2 / 2 where far is set; any d."""
    n, d = x.shape
    size = min(32, tiles.next_power_of_two(n))

    def row(i, refs, out_refs):
        x_ref, scale_ref = refs

        def across(t, _):
            at, inside = columns(t, size, n)

            def along(k, total):
                view = View(d, k * CHUNK, CHUNK)
                other = view.tile(x_ref, at, inside)
                difference = view.load(scale_ref) * (view.load(x_ref, i) - other)
                return total + _half_squared(difference)

            zero = jnp.zeros((size,), jnp.float32)
            total = loop(-(-d // CHUNK), along, zero)
            plt.store(out_refs[0].at[i, at], total, mask=inside)
            return 0

        loop(-(-n // size), across, 0)

    return overwrite(row, [u], far, [x, scale], n, "svgd_apart_distances", interpret)[0]


def combine(phi, far, weights, slopes, x, s, scale, c, *, base=None, step=None, interpret=False):
    """phi, or 1/N sum_j [K_ij s_j + W_ij c scale (x_i - x_j)] (x + step * that) where far is set; any d.

    Args:
      phi: (N, d) float32. weights, slopes: (N, N) float32, K and W. The rest as in `forward`.
    """
    n, d = x.shape
    chunks = -(-d // CHUNK)

    def row(task, refs, out_refs):
        k_ref, w_ref, x_ref, s_ref, scale_ref, c_ref, *base_refs = refs
        i, view = task // chunks, View(d, task % chunks * CHUNK, CHUNK)
        x_i, scale_, c_ = view.load(x_ref, i), view.load(scale_ref), view.load(c_ref)

        def tile(at, inside, total):
            difference = scale_ * (x_i - view.tile(x_ref, at, inside))
            score = view.tile(s_ref, at, inside)
            f, w = (
                plt.load(ref.at[i, at], mask=inside, other=0.0)[:, None] for ref in (k_ref, w_ref)
            )
            return total + jnp.sum(f * score + w * (c_ * difference), axis=0)

        y = walk(n, CHUNK, tile, jnp.zeros((CHUNK,), jnp.float32)) * (1.0 / n)
        if base_refs:
            y = view.load(base_refs[0], i) + base_refs[1][0] * y
        view.store(out_refs[0], i, y)

    more = [] if base is None else [base, _one(step)]
    arrays = [weights, slopes, x, s, scale, c, *more]
    return overwrite(row, [phi], far, arrays, n * chunks, "svgd_apart_combine", interpret)[0]


def _half_squared(difference):
    return 0.5 * jnp.sum(difference * difference, axis=1)


def _profile(kernel, u, inside, interpret):
    weights = pairs.profile(kernel, 2.0 * pairs.distance_scale(kernel) * u, interpret)
    return tuple(jnp.where(inside, x, 0.0) for x in weights)


def _one(number):
    return jnp.reshape(number, (1,)).astype(jnp.float32)
