"""Squared distances of all pairs of N particles, in blocks, as integers that sort like the distances.

Each unordered pair is visited once. The particles are cut into an odd number of blocks of B
rows; block i meets the blocks i, i+1, ..., i+(blocks-1)/2, wrapping around, so every block row
has the same work and no pair of blocks comes twice. Only inside a diagonal block is a pair met
from both sides, and there one of them is masked.

    distance^2 = sum_c (x_c - y_c)^2              up to DIRECT_DIMENSIONS dimensions
               = |x|^2 + |y|^2 - 2 x.y            above, centred, products in full precision

The second form loses digits when the distance is small beside |x|; `BlockKeys.direct` switches
to the first form in any dimension.

A distance must come out the same to the bit wherever a block is computed again. The compiler is
free to contract a*b + c into one rounding in one place and not in another, so nothing here
leaves it the choice: 2 x.y is exact whichever way it is subtracted, and each square of the
first form passes through an integer operation that the compiler cannot remove.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

DIRECT_DIMENSIONS = 8  # dimensions summed by differences; also the chunk of the direct loop
BLOCK_ELEMENTS = 2**20  # pairs a block: 4 MB of float32, near the size of a core's cache
ROWS = 128


@dataclasses.dataclass(frozen=True)
class PairLayout:
    """The static cut of N particles: `steps` blocks of (rows, columns) pairs cover every pair."""

    particles: int
    rows: int
    blocks: int  # odd
    groups: int  # column groups a block row

    @classmethod
    def of(cls, particles: int) -> PairLayout:
        """Blocks of about ROWS rows and at most BLOCK_ELEMENTS pairs."""
        half = max(1, round(particles / ROWS) // 2 + 1)
        groups = -(-half * ROWS * ROWS // BLOCK_ELEMENTS)
        blocks = 2 * groups * -(-half // groups) - 1
        rows = -(-particles // blocks)
        return cls(particles, -(-rows // 8) * 8, blocks, groups)

    @property
    def columns(self) -> int:
        return (self.blocks + 1) // 2 // self.groups * self.rows

    @property
    def padded(self) -> int:
        return self.blocks * self.rows

    @property
    def wrapped(self) -> int:
        """Length of the arrays in which every block row's columns lie in a row."""
        return self.padded + self.groups * self.columns

    @property
    def steps(self) -> int:
        return self.blocks * self.groups

    @property
    def elements(self) -> int:
        return self.steps * self.rows * self.columns

    def wrap(self, x: jax.Array) -> jax.Array:
        """Pad the leading axis with zeros to `padded`, then repeat its start up to `wrapped`."""
        x = jnp.pad(x, ((0, self.padded - self.particles),) + ((0, 0),) * (x.ndim - 1))
        return jnp.concatenate([x, x[: self.wrapped - self.padded]])

    def starts(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First row and first column of a step, as indices into a wrapped array."""
        row = step // self.groups * self.rows
        return row, row + step % self.groups * self.columns


def key_dtype(dtype) -> np.dtype:
    """The signed integer of the same width: nonnegative floats and their bits sort alike."""
    return jnp.dtype(jnp.int64 if jnp.dtype(dtype).itemsize == 8 else jnp.int32)


def to_key(distance: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(distance, key_dtype(distance.dtype))


def from_key(key: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(
        key, jnp.dtype(jnp.float64 if key.dtype.itemsize == 8 else jnp.float32)
    )


def masked_key(dtype):
    """The key of a pair that does not count: above every distance, infinity included."""
    return jnp.iinfo(key_dtype(dtype)).max


def power_of_two_below(x: jax.Array) -> jax.Array:
    """The largest power of two <= x for x > 0 in the middle of the range; 1 at zero."""
    bits = to_key(x)
    mantissa = jnp.finfo(x.dtype).nmant
    info = jnp.finfo(x.dtype)
    power = from_key(bits >> mantissa << mantissa)
    # 1/power must be a normal number too.
    power = jnp.clip(power, info.tiny * 4, 1 / (info.tiny * 4))
    return jnp.where(x > 0, power, jnp.ones_like(x))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class BlockKeys:
    """Particles prepared for block distances. Built by `prepare`; `keys(step)` gives a block.

    Lengths are divided by `power`, a power of two of the size of the largest coordinate: it
    costs no rounding, and squares neither overflow nor vanish for particles of any scale.
    """

    layout: PairLayout = dataclasses.field(metadata={"static": True})
    scaled: jax.Array  # (dimensions padded to the chunk, wrapped), transposed, not centred
    centred: jax.Array | None  # (d, wrapped), and None where differences are always direct
    norms: jax.Array | None  # (wrapped,) squared norms of `centred`
    masks: jax.Array  # (wrapped,) 0, or the masked key on padding
    power: jax.Array  # ()
    opaque_zero: jax.Array  # () an integer 0 unknown to the compiler
    direct: jax.Array  # () bool: use differences although `centred` exists
    finite: jax.Array  # () bool: every coordinate was finite; if not, all are zero here

    def replace(self, **changes) -> BlockKeys:
        return dataclasses.replace(self, **changes)

    def too_coarse(self, squared: jax.Array) -> jax.Array:
        """Whether the expansion cannot give a squared distance of this size to about 1e-4.

        Its error is some units in the last place of the largest |x|^2. (In float64: 1e-9.)
        """
        if self.norms is None:
            return jnp.zeros((), bool)
        resolution = 8 * jnp.sqrt(jnp.finfo(squared.dtype).eps).astype(squared.dtype)
        return jnp.max(self.norms) * resolution > squared

    def keys(self, step: jax.Array) -> jax.Array:
        """The (rows, columns) keys of one step's pairs; masked where a pair does not count."""
        layout = self.layout
        row, column = layout.starts(step)
        shape = (layout.rows, layout.columns)
        if self.centred is None:
            squared = self._add_differences(jnp.zeros(shape, self.scaled.dtype), 0, row, column)
        else:
            squared = self._expansion(row, column)
            # A loop of no iterations unless `direct`: under vmap it stays free for the lanes
            # that do not need it, where a cond would run both sides.
            chunks = self.scaled.shape[0] // DIRECT_DIMENSIONS
            start = jnp.where(self.direct, jnp.zeros_like(squared), squared)
            squared = lax.fori_loop(
                0,
                jnp.where(self.direct, chunks, 0),
                lambda c, total: self._add_differences(
                    total, c * DIRECT_DIMENSIONS, row, column
                ),
                start,
            )
        key = to_key(jnp.maximum(squared, 0))
        rows = lax.dynamic_slice(self.masks, (row,), (layout.rows,))
        columns = lax.dynamic_slice(self.masks, (column,), (layout.columns,))
        key = key | rows[:, None] | columns[None, :]
        # Column offsets past the diagonal block exceed every row offset, so this masks exactly
        # the diagonal and what lies below it.
        offset = lax.broadcasted_iota(jnp.int32, shape, 1) + (column - row)
        above = offset > lax.broadcasted_iota(jnp.int32, shape, 0)
        return jnp.where(above, key, masked_key(self.scaled.dtype))

    def _expansion(self, row, column):
        layout = self.layout
        d = self.centred.shape[0]
        rows = lax.dynamic_slice(self.centred, (0, row), (d, layout.rows))
        columns = lax.dynamic_slice(self.centred, (0, column), (d, layout.columns))
        product = lax.dot_general(
            rows, columns, (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST
        )
        row_norms = lax.dynamic_slice(self.norms, (row,), (layout.rows,))
        column_norms = lax.dynamic_slice(self.norms, (column,), (layout.columns,))
        return (row_norms[:, None] + column_norms[None, :]) - 2 * product

    def _add_differences(self, total, first, row, column):
        count = min(DIRECT_DIMENSIONS, self.scaled.shape[0])
        rows = lax.dynamic_slice(self.scaled, (first, row), (count, self.layout.rows))
        columns = lax.dynamic_slice(self.scaled, (first, column), (count, self.layout.columns))
        for c in range(count):
            difference = rows[c, :, None] - columns[c, None, :]
            total = total + _square(difference, self.opaque_zero)
        return total


def _square(x: jax.Array, opaque_zero: jax.Array) -> jax.Array:
    """x * x, rounded: a sum that follows cannot take the product into one rounding with it."""
    return from_key(to_key(x * x) ^ opaque_zero)


def _squared_norms(x: jax.Array, opaque_zero: jax.Array) -> jax.Array:
    """Sums of squares over the leading axis, from first to last."""
    return lax.fori_loop(
        0, x.shape[0], lambda c, total: total + _square(x[c], opaque_zero), jnp.zeros_like(x[0])
    )


def prepare(particles: jax.Array) -> BlockKeys:
    """Cut, scale and centre particles (N, d), float32 or float64, for block distances."""
    n, d = particles.shape
    layout = PairLayout.of(n)
    finite = jnp.all(jnp.isfinite(particles))
    x = jnp.where(finite, particles, jnp.zeros_like(particles))
    power = power_of_two_below(jnp.max(jnp.abs(x), initial=0))
    inverse = 1 / power
    x = x * inverse
    mantissa_bits = (1 << jnp.finfo(x.dtype).nmant) - 1
    opaque_zero = to_key(inverse) & jnp.asarray(mantissa_bits, key_dtype(x.dtype))
    if d <= DIRECT_DIMENSIONS:
        centred = norms = None
    else:
        # The middle of the range, not the mean: no order of summation can change it.
        centred = x - (jnp.min(x, axis=0) + jnp.max(x, axis=0)) / 2
        centred = layout.wrap(centred).T
        norms = _squared_norms(centred, opaque_zero)
        x = jnp.pad(x, ((0, 0), (0, -d % DIRECT_DIMENSIONS)))
    masks = np.where(np.arange(layout.padded) < n, 0, masked_key(x.dtype))
    masks = np.concatenate([masks, masks[: layout.wrapped - layout.padded]])
    return BlockKeys(
        layout=layout,
        scaled=layout.wrap(x).T,
        centred=centred,
        norms=norms,
        masks=jnp.asarray(masks, key_dtype(x.dtype)),
        power=power,
        opaque_zero=opaque_zero,
        direct=jnp.zeros((), bool),
        finite=finite,
    )
