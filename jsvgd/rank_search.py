"""The k-th smallest of a set of numbers that can only be counted: exact, in a few passes.

Made for the squared distances of all pairs of particles, too many to sort or to store. A pass
over them counts how many lie at or below each of a few thresholds. The first thresholds come
from a small sorted sample, the next ones from interpolation inside the bracket (low, high] that
the counts prove to hold the answer. A pass also reports the smallest and the largest number
inside the bracket, so the bracket always ends on numbers that occur; when its end has the wanted
rank, that end is the answer. About five passes do; a threshold halfway in the bracket bounds
their number by the bits of a float, whatever the numbers are.

Numbers are compared as integers, the bit patterns of nonnegative floats, and counted in integers,
so the answer is one of the given numbers to the bit. The sample only guides the search: it never
decides the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jsvgd.pairs import from_key, masked_key, to_key

__all__ = ["Count", "Tally", "search"]

# Thresholds of a pass, in standard deviations of the rank's estimate around the rank.
OFFSETS = np.array([-3.0, -1.2, -0.4, 0.0, 0.4, 1.2, 3.0], np.float32)
LIMB = 30  # counts are high * 2**30 + low: they pass 2**31 from N = 65536, with x64 off


class Count(NamedTuple):
    """An exact nonnegative integer in two int32 limbs, so that it does not depend on x64."""

    high: jax.Array
    low: jax.Array  # in [0, 2**LIMB)

    @classmethod
    def of(cls, value: int) -> Count:
        high, low = divmod(value, 1 << LIMB)
        return cls(jnp.int32(high), jnp.int32(low))

    def add(self, small: jax.Array) -> Count:
        """self + small for int32 small in [0, 2**LIMB)."""
        low = self.low + small
        return Count(self.high + (low >> LIMB), low & ((1 << LIMB) - 1))

    def at_least(self, other: Count) -> jax.Array:
        return (self.high > other.high) | ((self.high == other.high) & (self.low >= other.low))

    def equals(self, other: Count) -> jax.Array:
        return (self.high == other.high) & (self.low == other.low)

    def minus(self, other: Count) -> jax.Array:
        """The difference, rounded to float32: for interpolation, never for a decision."""
        high = (self.high - other.high).astype(jnp.float32)
        return high * float(1 << LIMB) + (self.low - other.low).astype(jnp.float32)

    def take(self, index: jax.Array) -> Count:
        return Count(self.high[index], self.low[index])


class Tally(NamedTuple):
    """What a pass over the pairs reports."""

    counts: Count  # (K,) pairs with key <= threshold
    smallest: jax.Array | None  # (R,) smallest key > low; the masked key if none
    largest: jax.Array | None  # (R,) largest key <= high; -1 if none


Pass = Callable[[jax.Array, jax.Array, jax.Array], Tally]
"""(thresholds (K,), low (R,), high (R,)) -> Tally, all as keys: one pass over the pairs.

A pass that only counts gives None for smallest and largest; the search then takes more passes.
"""


class Bracket(NamedTuple):
    """The key of the wanted rank lies in (low, high]; below counts keys <= low, upto keys <= high."""

    low: jax.Array
    high: jax.Array
    below: Count
    upto: Count

    def done(self) -> jax.Array:
        return self.high - self.low <= 1


def search(one_pass: Pass, ranks: tuple[int, ...], pairs: int, sample: jax.Array) -> jax.Array:
    """Keys of the given 1-based ranks among `pairs` keys, by repeated passes.

    Args:
      one_pass: counts keys; see ``Pass``. Under a sharded pass the counts are global.
      ranks: R ranks in [1, pairs].
      pairs: how many keys there are.
      sample: (S,) sorted keys of a sample, of any quality.

    Returns:
      (R,) keys.
    """
    top = masked_key(from_key(sample).dtype) - 1

    def repeat(value):
        return jnp.full((len(ranks),), value)

    zero, total = Count.of(0), Count.of(pairs)
    wanted = Count(*(jnp.stack(limb) for limb in zip(*map(Count.of, ranks), strict=True)))
    bracket = Bracket(
        low=repeat(jnp.asarray(-1, sample.dtype)),
        high=repeat(jnp.asarray(top, sample.dtype)),
        below=Count(*map(repeat, zero)),
        upto=Count(*map(repeat, total)),
    )
    size = sample.shape[0]
    thresholds = []
    for rank in ranks:
        # The sample's order statistics spread by about sqrt(size)/2 ranks around the right one.
        places = rank / pairs * size - 0.5 + 0.6 * math.sqrt(size) * np.append(OFFSETS, 5.0)
        thresholds.append(sample[np.clip(np.round(places), 0, size - 1).astype(np.int32)])
    limit = 8 * sample.dtype.itemsize + 8

    def unfinished(state):
        step, _, bracket = state
        return (step < limit) & ~jnp.all(bracket.done())

    def body(state):
        step, thresholds, bracket = state
        tally = one_pass(thresholds.reshape(-1), bracket.low, bracket.high)
        counts = Count(*(limb.reshape(thresholds.shape) for limb in tally.counts))
        bracket = jax.vmap(_tighten)(
            bracket, wanted, thresholds, counts, tally.smallest, tally.largest
        )
        return step + 1, jax.vmap(_interpolate)(bracket, wanted), bracket

    state = (jnp.int32(0), jnp.stack(thresholds), bracket)
    return lax.while_loop(unfinished, body, state)[2].high


def _tighten(bracket, wanted, thresholds, counts, smallest, largest) -> Bracket:
    """The bracket of one rank after a pass."""
    if smallest is None:
        low, high, answer, known = bracket.low, bracket.high, bracket.high, False
    else:
        low, high = smallest - 1, largest
        # The end of the bracket that has the wanted rank is the answer.
        first = bracket.below.add(1).equals(wanted)
        last = bracket.upto.equals(wanted)
        answer = jnp.where(first, smallest, largest)
        known = first | last | (smallest >= largest)
    above = counts.at_least(wanted)
    # Thresholds may come in any order and lie outside the bracket: take the tightest that help.
    upper = jnp.where(above & (thresholds < high), thresholds, masked_key(from_key(low).dtype))
    lower = jnp.where(~above & (thresholds > low), thresholds, -1)
    u, l = jnp.argmin(upper), jnp.argmax(lower)
    better_high, better_low = upper[u] < high, lower[l] > low
    new = Bracket(
        low=jnp.where(better_low, lower[l], low),
        high=jnp.where(better_high, upper[u], high),
        below=_where(better_low, counts.take(l), bracket.below),
        upto=_where(better_high, counts.take(u), bracket.upto),
    )
    return Bracket(
        low=jnp.where(bracket.done(), bracket.low, jnp.where(known, answer - 1, new.low)),
        high=jnp.where(bracket.done(), bracket.high, jnp.where(known, answer, new.high)),
        below=new.below,
        upto=new.upto,
    )


def _where(condition, x: Count, y: Count) -> Count:
    return Count(jnp.where(condition, x.high, y.high), jnp.where(condition, x.low, y.low))


def _interpolate(bracket: Bracket, wanted: Count) -> jax.Array:
    """Thresholds for the next pass of one rank: around the rank's place, and the middle."""
    inside = jnp.maximum(bracket.upto.minus(bracket.below), 1)
    place = (wanted.minus(bracket.below) - 0.5) / inside
    spread = jnp.maximum(jnp.sqrt(place * (1 - place) / inside), 0.5 / inside)
    few = np.arange(1, len(OFFSETS) + 1, dtype=np.float32) / (len(OFFSETS) + 1)
    fractions = jnp.where(inside < 8, few, jnp.clip(place + spread * OFFSETS, 0, 1))
    # Values, not keys, are close to evenly spread inside a bracket; float32 is fine for a guess.
    low = from_key(jnp.maximum(bracket.low, 0))
    width = jnp.minimum(from_key(bracket.high), jnp.finfo(low.dtype).max) - low
    guesses = to_key(low + width * fractions.astype(low.dtype))
    middle = bracket.low + (bracket.high - bracket.low) // 2
    guesses = jnp.concatenate([guesses, middle[None]])
    return jnp.clip(guesses, bracket.low + 1, jnp.maximum(bracket.high - 1, bracket.low + 1))
