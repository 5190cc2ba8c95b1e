"""Few particles: the direction from raw arrays in two launches.

With up to a couple of thousand particles the pairs cost microseconds, as much as the launch of a kernel that
centres, scales, splits or sums something. So a program does all of that to the tiles it reads: it centres
on the mean of the first particles, scales, takes norms, splits, and forms

    rbf  K (s - c z) + rowsum(K) c z_i;    imq  K s - W (c z) + rowsum(W) c z_i

over its share of the particles, as the larger kernels of `triton_forward` do with operands prepared once. A
second launch adds the shares, or takes differences where particles are far (`triton_apart`).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import triton_apart
from pallas_kernels import triton_pairs as pairs
from pallas_kernels import triton_tiles as tiles
from pallas_kernels.stacks import over_stacks

# Few terms do not average rounding out: 21 bits for the values too, where many make do with 16.
VALUES = jnp.float32
CENTRE = 32  # particles whose mean is the centre: phi does not depend on it, its rounding hardly


def forward(
    q,
    x,
    s,
    scale,
    c,
    *,
    kernel,
    precision,
    limit,
    base=None,
    step=None,
    interpret=False,
    choice=None,
):
    """The direction at the queries, or base + step * direction; by differences where particles are far.

    Args:
      q: (M, d) float32 raw queries. x, s: (N, d) float32 raw particles and scores.
      scale, c: (d,) float32, 1/sqrt(h) and repulsion/sqrt(h).
      kernel: "rbf" or "imq". precision: "highest", "high" or "default".
      limit: |z|^2/2 beyond which particles are far.
      base: (M, d) float32 or None. step: float32 scalar or None; both or neither.

    d is at most 256; more particles than a few thousand are better served by `triton_forward`.

    Returns:
      (M, d) float32.
    """
    more = () if base is None else (base, jnp.asarray(step, jnp.float32))
    return _direction(kernel, precision, limit, interpret, choice)(q, x, s, scale, c, *more)


@functools.cache
def _direction(*options):
    return over_stacks(functools.partial(_batched, options))


def _batched(options, *arrays):
    """Arrays with a leading axis of problems to results (B, M, d)."""
    kernel, _, _, interpret, _ = options
    parts, far = _parts(options, *arrays[:5])

    def assemble(parts, far, q, x, s, scale, c, base=None, step=None):
        given = parts, far, q, x, s, scale, c
        options = {"kernel": kernel, "base": base, "step": step, "interpret": interpret}
        return triton_apart.assemble(*given, **options)

    return jax.vmap(assemble)(parts, far, *arrays)


def _parts(options, *arrays):
    """The directions in parts to be added (B, P, M, d), and flags (B, programs): not 0 where a program met
    a particle beyond the limit. How many parts there are depends on the batch."""
    kernel, precision, limit, interpret, choice = options
    batch, m, d = arrays[0].shape
    n = arrays[1].shape[1]
    choice = choice or tiles.small_tiles(n, m, d, precision, batch)
    row_tiles, column_tiles = -(-m // choice.bm), -(-n // choice.bn)
    turns = -(-column_tiles // min(choice.splits, column_tiles))
    splits = -(-column_tiles // turns)
    program = functools.partial(
        _program,
        kernel=kernel, precision=precision, limit=limit, interpret=interpret, choice=choice,
        width=max(16, tiles.next_power_of_two(d)), turns=turns,
    )  # fmt: skip
    program.__name__ = name = f"svgd_small_{kernel}"
    whole = pl.BlockSpec()
    call = pl.pallas_call(
        program,
        grid=(row_tiles, splits),
        in_specs=[whole] * 5,
        out_specs=[whole, pl.BlockSpec((1, 1), lambda i, split: (i, split))],
        out_shape=[
            jax.ShapeDtypeStruct((splits, m, d), jnp.float32),
            jax.ShapeDtypeStruct((row_tiles, splits), jnp.int32),
        ],
        compiler_params=plt.CompilerParams(num_warps=choice.warps, num_stages=choice.stages),
        interpret=interpret,
        name=name,
    )
    parts, flags = jax.vmap(call)(*arrays)
    return parts, flags.reshape(batch, -1)


def _program(
    q_ref, x_ref, s_ref, scale_ref, c_ref, out_ref, flag_ref,
    *, kernel, precision, limit, interpret, choice, width, turns,
):  # fmt: skip
    n, d = x_ref.shape
    m = q_ref.shape[0]
    i, split = pl.program_id(0), pl.program_id(1)
    # Traced starts: JAX refuses a slice beyond an edge that it can see, mask or no mask.
    nothing = 0 * split
    dimensions = pl.ds(nothing, width)
    inside_d = nothing + jnp.arange(width) < d

    def vector(ref):
        return plt.load(ref.at[dimensions], mask=inside_d, other=0.0)[None, :]

    def tile(ref, start, size):
        inside = start + jnp.arange(size) < ref.shape[0]
        mask = inside[:, None] & inside_d[None, :]
        return plt.load(ref.at[pl.ds(start, size), dimensions], mask=mask, other=0.0), inside

    scale, c = vector(scale_ref), vector(c_ref)
    centre = jnp.sum(tile(x_ref, nothing, CENTRE)[0], axis=0)[None, :] * (1.0 / min(n, CENTRE))
    root = math.sqrt(pairs.distance_scale(kernel))

    def standardised(ref, start, size):
        """z, the parts of root z, |root z|^2, and which rows are there."""
        raw, inside = tile(ref, start, size)
        z = jnp.where(inside[:, None], (raw - centre) * scale, 0.0)
        parts = pairs.split_tile(root * z, precision, jnp.float16)
        return z, parts, pairs.norms(parts), inside

    cut = functools.partial(pairs.split_tile, precision=precision, dtype=VALUES)
    z_i, q, q_norm, _ = standardised(q_ref, i * choice.bm, choice.bm)
    start = split * (turns * choice.bn)

    def turn(t, carry):
        total, weight_sum, reach = carry
        at = start + t * choice.bn
        z_j, k, k_norm, inside = standardised(x_ref, at, choice.bn)
        distance = pairs.distances(q, k, q_norm[:, None], k_norm[None, :], interpret)
        f, w, _ = (
            jnp.where(inside[None, :], v, 0.0) for v in pairs.profile(kernel, distance, interpret)
        )
        score, _ = tile(s_ref, at, choice.bn)
        drift = c * z_j
        if kernel == "rbf":
            total += pairs.product(cut(f), cut(score - drift), (1, 0))
        else:
            total += pairs.product(cut(f), cut(score), (1, 0))
            total -= pairs.product(cut(w), cut(drift), (1, 0))
        return total, weight_sum + jnp.sum(w, axis=1), jnp.maximum(reach, k_norm)

    zeros = (
        jnp.zeros((choice.bm, width), jnp.float32),
        jnp.zeros((choice.bm,), jnp.float32),
        jnp.zeros((choice.bn,), jnp.float32),
    )
    total, weight_sum, reach = lax.fori_loop(0, turns, turn, zeros)
    phi = (total + weight_sum[:, None] * (c * z_i)) * (1.0 / n)
    rows = i * choice.bm + jnp.arange(choice.bm)
    at = (split, pl.ds(i * choice.bm, choice.bm), dimensions)
    plt.store(out_ref.at[at], phi, mask=(rows < m)[:, None] & inside_d[None, :])
    bound = 2.0 * limit * root * root
    # Not within the bound, rather than beyond it: a NaN must not hide a particle that is far.
    far = ~((jnp.max(reach) <= bound) & (jnp.max(q_norm) <= bound))
    flag_ref[0, 0] = far.astype(jnp.int32)
