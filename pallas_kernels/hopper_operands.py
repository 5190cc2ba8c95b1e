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
    "exponent_operand",
    "halves",
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
    x = pad_to(x, x.shape[0], chunks * lane).reshape(-1, chunks, 1, lane)
    exponent, mantissa = (8, 7) if jnp.dtype(dtype) == jnp.bfloat16 else (5, 10)
    hi = lax.reduce_precision(x, exponent, mantissa)
    # One elementwise fusion, where a concatenation would be a kernel of its own.
    piece = lax.broadcasted_iota(jnp.int32, (1, 1, pieces, 1), 2)
    return jnp.where(piece == 0, hi, x - hi).astype(dtype).reshape(x.shape[0], -1)


def halves(t: Array, cut_bits: bool) -> tuple[Array, Array]:
    """float32 = hi + lo in bfloat16, inside a kernel, where no compiler removes the rounding.

    By conversions, or by integer instructions on the words (round half away from zero): conversions run
    at a fraction of the rate, which shows where few products hide them. A NaN is not kept by the
    latter; its particle's values are NaN too and carry it.
    """
    if not cut_bits:
        hi = t.astype(jnp.bfloat16)
        return hi, (t - hi.astype(jnp.float32)).astype(jnp.bfloat16)
    bits = lax.bitcast_convert_type(t, jnp.int32) + 0x8000
    rest = t - lax.bitcast_convert_type(bits & -65536, jnp.float32)
    return _upper(bits), _upper(lax.bitcast_convert_type(rest, jnp.int32) + 0x8000)


def _upper(bits: Array) -> Array:
    upper = lax.shift_right_logical(bits, jnp.full_like(bits, 16)).astype(jnp.int16)
    return lax.bitcast_convert_type(upper, jnp.bfloat16)


def exponent_operand(y: Array, layout: Layout, rows: int, role: str) -> tuple[Array, Array]:
    """(n, d) float32 to one side of the exponent's product and the half norms.

    Returns:
      float16 (rows, columns) and float32 (rows,); the half norms of padded keys are ``FAR``. Packed
      operands hold the half norms too, those of "keys" and of "queries" in different places.
    """
    half = 0.5 * jnp.sum(y * y, 1)
    far = FAR if role == "keys" else 0.0
    half = jnp.pad(half, (0, rows - half.shape[0]), constant_values=far)
    y = pad_to(y, rows)
    if not layout.packed:
        return pack_pair(y, layout.lane, layout.chunks, layout.pieces, jnp.float16), half
    hi, lo = split_pair(y, jnp.float16)
    norms = split_pair(-half[:, None], jnp.float16)
    ones = jnp.ones((rows, 2), jnp.float16)
    parts = [hi, hi, lo, ones, *norms] if role == "keys" else [hi, lo, hi, *norms, ones]
    return pad_to(jnp.concatenate(parts, axis=1), rows, layout.lane), half


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
