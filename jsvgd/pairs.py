"""Squared distances of all pairs of N particles, in blocks, as integers that sort like the distances.

Each unordered pair is visited once. The particles are cut into an odd number of blocks of B
rows; block i meets the blocks i, i+1, ..., i+(blocks-1)/2, wrapping around, so every block row
has the same work and no pair of blocks comes twice. Only inside a diagonal block is a pair met
from both sides, and there one of them is masked.

    distance^2 = sum_c (x_c - y_c)^2              where that is cheap, or blocks are recomputed
               = |x|^2 + |y|^2 - 2 x.y            in many dimensions, blocks kept

The second form is a matrix product. It loses digits when the distance is small beside |x|, and
then `BlockKeys.direct` returns to the first form. Nor does it come out the same to the bit
wherever it is compiled, so it serves only where the blocks of all pairs fit in a constant
workspace and are computed once.

The first form does come out the same, by care: a compiler is free to contract a*b + c into one
rounding here and two there, so each square passes through an integer operation that no compiler
can remove.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

CHUNK = 8  # dimensions summed by differences in one sweep of a block
DIRECT_WORK = 2**20  # pairs times dimensions below which the matrix product gains nothing
STORED_ELEMENTS = 2**24  # up to 64 MB of distances are kept between passes: N of about 5700
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

    @property
    def stored(self) -> bool:
        """Whether the blocks of all pairs fit in the workspace."""
        return self.elements <= STORED_ELEMENTS

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
    """Particles prepared for block distances by `prepare`; `blocks` gives them.

    Lengths are divided by `power`, a power of two of the size of the largest coordinate: it
    costs no rounding, and squares neither overflow nor vanish for particles of any scale.
    """

    layout: PairLayout = dataclasses.field(metadata={"static": True})
    scaled: jax.Array  # (d padded to chunks, wrapped), transposed, not centred
    centred: jax.Array | None  # (wrapped, d), or None where differences are always direct
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

    def blocks(self, direct: jax.Array) -> jax.Array | None:
        """All blocks (steps, rows, columns) where they fit in the workspace, else None."""
        if not self.layout.stored:
            return None
        return lax.map(self.replace(direct=direct).keys, jnp.arange(self.layout.steps))

    def keys(self, step: jax.Array) -> jax.Array:
        """The (rows, columns) keys of one step's pairs; masked where a pair does not count."""
        layout = self.layout
        row, column = layout.starts(step)
        shape = (layout.rows, layout.columns)
        chunks = -(-self.scaled.shape[0] // CHUNK)
        if self.centred is None:
            squared = jnp.zeros(shape, self.scaled.dtype)
            sweeps = chunks
        else:
            # No sweep unless `direct`. As a loop this stays free under vmap for the chains that
            # do not need it, where a cond would run both sides.
            squared = jnp.where(self.direct, 0, self._expansion(row, column))
            sweeps = jnp.where(self.direct, chunks, 0)
        if self.centred is None and chunks == 1:
            squared = self._add_differences(0, squared, row, column)
        else:
            add = functools.partial(self._add_differences, row=row, column=column)
            squared = lax.fori_loop(0, sweeps, add, squared)
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
        d = self.centred.shape[1]
        rows = lax.dynamic_slice(self.centred, (row, 0), (layout.rows, d))
        columns = lax.dynamic_slice(self.centred, (column, 0), (layout.columns, d))
        product = lax.dot_general(
            rows, columns, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
        )
        row_norms = lax.dynamic_slice(self.norms, (row,), (layout.rows,))
        column_norms = lax.dynamic_slice(self.norms, (column,), (layout.columns,))
        return (row_norms[:, None] + column_norms[None, :]) - 2 * product

    def _add_differences(self, chunk, total, row, column):
        count = min(CHUNK, self.scaled.shape[0])
        first = chunk * CHUNK
        rows = lax.dynamic_slice(self.scaled, (first, row), (count, self.layout.rows))
        columns = lax.dynamic_slice(self.scaled, (first, column), (count, self.layout.columns))
        for c in range(count):
            difference = rows[c, :, None] - columns[c, None, :]
            total = total + _square(difference, self.opaque_zero)
        return total


def _square(x: jax.Array, opaque_zero: jax.Array) -> jax.Array:
    """x * x, rounded: a sum that follows cannot take the product into one rounding with it."""
    return from_key(to_key(x * x) ^ opaque_zero)


def _row_sums(x: jax.Array) -> jax.Array:
    """Sums over the last axis by halves: the order of a library's reduction can depend on vmap."""
    while x.shape[1] > 1:
        x = jnp.pad(x, ((0, 0), (0, x.shape[1] % 2)))
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


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
    centred = norms = None
    if d > CHUNK:
        if layout.stored and layout.elements * d > DIRECT_WORK:
            # The middle of the range, not the mean: no order of summation can change it.
            centred = layout.wrap(x - (jnp.min(x, axis=0) + jnp.max(x, axis=0)) / 2)
            norms = _row_sums(_square(centred, opaque_zero))
        x = jnp.pad(x, ((0, 0), (0, -d % CHUNK)))
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
