"""The fused direction on Hopper (JAX >= 0.11).

With standardised particles z, y = z sqrt(log2 e), half norms a = |y|^2 / 2 and v = s - c z:

    K_ij = exp2(y_i . y_j - a_i - a_j),    phi_i = 1/N ( sum_j K_ij v_j + (sum_j K_ij) c z_i ).

Here are the operands before the kernel (`hopper_forward_kernel`) and the sum's last steps after it.
"""

from __future__ import annotations

import functools

import jax
from jax import Array

from pallas_kernels import hopper_operands as operands
from pallas_kernels import hopper_tiles
from pallas_kernels.hopper_forward_kernel import launch
from pallas_kernels.hopper_operands import LOG2E_ROOT, Layout
from pallas_kernels.hopper_tiles import ForwardTiles
from pallas_kernels.stacks import over_stacks

__all__ = ["available", "forward", "supports"]


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
    if zq is zk:
        phi = _direction(precision, tiles, True)(zk, s, c)
    else:
        phi = _direction(precision, tiles, False)(zq, zk, s, c)
    return phi if base is None else base + scale * phi


@functools.cache
def _direction(precision: str, plan, square: bool):
    def batched(*arrays):
        zq, zk, s, c = (arrays[0], *arrays) if square else arrays
        return _batched(zq, zk, s, c, precision=precision, plan=plan)

    return over_stacks(batched)


def _batched(zq, zk, s, c, *, precision, plan):
    """(B, M, d), (B, N, d), (B, N, d), (B, d) to phi (B, M, d): pad, pack, launch, finish."""
    (b, m, d), n = zq.shape, zk.shape[1]
    layout, tiles = plan or hopper_tiles.forward_tiles(n, m, d, precision, b)
    rows_q = hopper_tiles.round_up(m, tiles.warpgroups * tiles.block_q)
    rows_k = hopper_tiles.round_up(n, tiles.splits * tiles.block_k)
    square = zq is zk
    if square:
        both = hopper_tiles.common_rows(n, tiles)
        rows_q, rows_k = (both, both) if both else (rows_q, rows_k)
    operand = functools.partial(operands.exponent_operand, layout=layout)
    k, ak = jax.vmap(functools.partial(operand, rows=rows_k, role="keys"))(zk * LOG2E_ROOT)
    if square and rows_q == rows_k and not layout.packed:
        # A padded query's half norm does not matter: its row is dropped.
        q, aq = k, ak
    else:
        q, aq = jax.vmap(functools.partial(operand, rows=rows_q, role="queries"))(zq * LOG2E_ROOT)
    value = functools.partial(operands.value_operand, layout=layout, rows=rows_k)
    v = jax.vmap(value)(s - c[:, None, :] * zk)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, aq, ak, v)]
    steps = rows_k // (tiles.splits * tiles.block_k)
    total, weight = launch(*flat, layout=layout, tiles=tiles, batch=b, steps=steps)
    total = total.sum(0).reshape(b, rows_q, -1)[:, :m]
    if layout.packed:
        weight = total[..., 0]
        total = total[..., 1 : 3 * d + 1].reshape(b, m, 3, d).sum(2)
    else:
        weight = weight.sum(0).reshape(b, rows_q)[:, :m]
        total = total[..., :d]
    return (total + weight[..., None] * (c[:, None, :] * zq)) / n
