"""Operands of the Hopper kernels: float32 arrays cut into 16-bit pieces, padded and packed.

A float32 number times a float32 number needs three 16-bit tensor-core products to be float32-class:

    x y  =  x_hi y_hi + x_hi y_lo + x_lo y_hi  (+ x_lo y_lo, below rounding)

with x_hi the number rounded to 16 bits and x_lo the rounded rest. Two layouts of those pieces are used.

split   The pieces of every block of ``lane`` columns lie side by side, ``[hi | lo]``, so that one copy
        brings both; the kernel issues the three products.
packed  Few dimensions: the three products become one by lying along the contraction, half norms
        included: ``[hi, lo, hi, -a_hi, -a_lo, 1, 1] . [hi, hi, lo, 1, 1, -a_hi, -a_lo]`` is the whole
        exponent. Values are ``[1, hi, mid, lo]``: one product carries all 24 bits and the row sum.

The exponent's operands are float16 (11 + 11 bits: standardised particles fit its range, which ends at
65504); values keep bfloat16 (8 + 8 bits), because scores may have any magnitude.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

__all__ = [
    "FAR",
    "LOG2E_ROOT",
    "Layout",
    "exponent_operands",
    "layout_for",
    "pack_pair",
    "pad_to",
    "split_pair",
    "value_operand",
]

LOG2E_ROOT = math.sqrt(math.log2(math.e))
"""Particles times this give exponents in base two: exp(-u) = exp2(-u log2 e)."""

FAR = 6.0e4
"""Half norm of a padded key, finite in float16: exp2 of anything minus this is exactly zero."""


class Layout(NamedTuple):
    """How (n, d) float32 operands become columns of 16-bit pieces.

    Attributes:
      packed: whether the products lie along the contraction (see the module's docstring).
      lane: columns of one piece of the exponent's operands, 16, 32 or 64 (the swizzle is 2 * lane bytes).
      value_lane: the same for the values.
      chunks: blocks of ``lane`` columns that cover d.
      pieces: 2 where a low half is kept, else 1 (``precision="default"``).
    """

    packed: bool
    lane: int
    value_lane: int
    chunks: int
    pieces: int

    @property
    def columns(self) -> int:
        """Columns of the exponent's operands."""
        return self.chunks * self.pieces * self.lane

    @property
    def value_columns(self) -> int:
        """Columns of the values."""
        return self.chunks * self.pieces * self.value_lane

    @property
    def width(self) -> int:
        """Columns of the float32 result."""
        return self.chunks * self.value_lane


def layout_for(d: int, precision: str, packed_up_to: int) -> Layout:
    """The layout for d dimensions; packed where ``d <= packed_up_to`` and the pieces are two."""
    if precision == "high" and d <= packed_up_to:
        return Layout(True, _lane(3 * d + 4), _lane(3 * d + 1), 1, 1)
    lane = _lane(min(d, 64))
    return Layout(False, lane, lane, -(-d // lane), 2 if precision == "high" else 1)


def _lane(columns: int) -> int:
    for lane in (16, 32, 64):
        if columns <= lane:
            return lane
    raise ValueError(f"columns must be at most 64, got {columns}")


def split_pair(x: Array, dtype) -> tuple[Array, Array]:
    """High and low halves of a float32 array in a 16-bit dtype, x = hi + lo to twice its bits.

    ``lax.reduce_precision`` and not a round trip through ``astype``: XLA may remove the latter (excess
    precision), which would leave lo equal to zero.
    """
    exponent, mantissa = (8, 7) if jnp.dtype(dtype) == jnp.bfloat16 else (5, 10)
    hi = lax.reduce_precision(x, exponent, mantissa)
    return hi.astype(dtype), (x - hi).astype(dtype)


def pad_to(x: Array, rows: int, columns: int | None = None) -> Array:
    """x (n, ...) with zeros appended up to (rows,) or (rows, columns)."""
    widths = [(0, 0)] * x.ndim
    widths[0] = (0, rows - x.shape[0])
    if columns is not None:
        widths[1] = (0, columns - x.shape[1])
    return jnp.pad(x, widths)


def pack_pair(x: Array, lane: int, chunks: int, pieces: int, dtype) -> Array:
    """(n, d) float32 to (n, chunks * pieces * lane): per chunk ``[hi | lo]`` (``[hi]`` for one piece)."""
    x = pad_to(x, x.shape[0], chunks * lane)
    halves = split_pair(x, dtype)[:pieces]
    if pieces == 1:
        return halves[0]
    blocks = [half.reshape(-1, chunks, 1, lane) for half in halves]
    return jnp.concatenate(blocks, axis=2).reshape(x.shape[0], -1)


def exponent_operands(yq: Array, yk: Array, layout: Layout, rows_q: int, rows_k: int):
    """(M, d) and (N, d) float32 to the two operands of the exponent and the half norms.

    Returns:
      queries (rows_q, columns), keys (rows_k, columns) float16, half norms (rows_q,) and (rows_k,)
      float32 with ``FAR`` at padded keys. Packed operands hold the half norms themselves.
    """
    aq = pad_to(0.5 * jnp.sum(yq * yq, 1), rows_q)
    ak = 0.5 * jnp.sum(yk * yk, 1)
    ak = jnp.pad(ak, (0, rows_k - ak.shape[0]), constant_values=FAR)
    yq, yk = pad_to(yq, rows_q), pad_to(yk, rows_k)
    if not layout.packed:
        arguments = (layout.lane, layout.chunks, layout.pieces, jnp.float16)
        return pack_pair(yq, *arguments), pack_pair(yk, *arguments), aq, ak
    (qh, ql), (kh, kl) = split_pair(yq, jnp.float16), split_pair(yk, jnp.float16)
    aqh, aql = split_pair(-aq[:, None], jnp.float16)
    akh, akl = split_pair(-ak[:, None], jnp.float16)
    one_q, one_k = jnp.ones_like(aqh), jnp.ones_like(akh)
    q = jnp.concatenate([qh, ql, qh, aqh, aql, one_q, one_q], axis=1)
    k = jnp.concatenate([kh, kh, kl, one_k, one_k, akh, akl], axis=1)
    return pad_to(q, rows_q, layout.lane), pad_to(k, rows_k, layout.lane), aq, ak


def value_operand(v: Array, layout: Layout, rows: int) -> Array:
    """(N, d) float32 to the bfloat16 values (rows, value_columns); padded rows are zero.

    Packed, the columns are ``[1, hi, mid, lo]`` of widths 1, d, d, d.
    """
    if not layout.packed:
        v = pad_to(v, rows)
        return pack_pair(v, layout.value_lane, layout.chunks, layout.pieces, jnp.bfloat16)
    hi = lax.reduce_precision(v, 8, 7)
    pieces = hi.astype(jnp.bfloat16), *split_pair(v - hi, jnp.bfloat16)
    columns = jnp.concatenate([jnp.ones_like(pieces[0][:, :1]), *pieces], axis=1)
    return pad_to(columns, rows, layout.value_lane)
