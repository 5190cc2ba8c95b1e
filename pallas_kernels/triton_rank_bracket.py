"""The bracket of a search for the number of a given rank, inside a kernel, from counts.

Numbers u >= 0 are squared distances as integers: 0 below 2^-96, else the bits of the float minus those of the
number below 2^-96. The wanted one lies in (low, high]; `below` counts numbers <= low and `upto`
numbers <= high. Counts are pairs (high limb, low limb) in base 2^16 where they can pass 2^31.

    even        2^b thresholds at equal steps in u: whatever the numbers, a pass takes b bits off the bracket
    guessed     thresholds around the interpolated place of the rank, dense near it: two passes do, mostly

A pass may guess only while the passes that remain could finish by even steps alone.
"""

import math
import statistics

import jax.numpy as jnp

from pallas_kernels.triton_rank_tiles import bits, number

LEAST = (127 - 96) << 23  # bits of 2^-96: smaller distances count as 0
# No squared distance is larger, in coordinates below 2^8 and up to 2^9 dimensions.
TOP = (96 + 28) << 23
RANGE_BITS = 30  # TOP < 2^30
LIMB = 16
NONE = 1 << 30
MANY = (1 << 31) - 1


def to_u(x):
    return jnp.maximum(bits(x), LEAST - 1) - (LEAST - 1)


def from_u(u):
    return number(jnp.where(u > 0, u + (LEAST - 1), 0))


def power_of_two(count):
    """b of count = 2^b."""
    return count.bit_length() - 1


def passes(thresholds, bits_after=0):
    """How many passes suffice before those that take `bits_after` bits, the first one free to guess."""
    return 1 + -(-max(0, RANGE_BITS - bits_after) // power_of_two(thresholds))


def limbs(value):
    return value >> LIMB, value & ((1 << LIMB) - 1)


class Bracket:
    """The bracket of one rank, as traced int32 scalars; with one limb, the high ones are 0."""

    FIELDS = ("low", "high", "below_high", "below_low", "upto_high", "upto_low")

    def __init__(self, two_limbs, *values):
        self.two_limbs = two_limbs  # static
        for name, value in zip(self.FIELDS, values, strict=True):
            setattr(self, name, value)

    @classmethod
    def whole(cls, two_limbs, total, zero):
        """The bracket of which nothing is known but how many numbers there are."""
        high, low = limbs(total) if two_limbs else (0, total)
        return cls(two_limbs, zero - 1, zero + TOP, zero, zero, zero + high, zero + low)

    def values(self):
        return [getattr(self, name) for name in self.FIELDS]

    def where(self, condition, other):
        """self where the condition holds, else other."""
        pairs = zip(self.values(), other.values(), strict=True)
        return Bracket(self.two_limbs, *(jnp.where(condition, a, b) for a, b in pairs))

    def open(self):
        return self.high - self.low > 1

    def with_below(self, counts, condition):
        """Counts of what lies inside, with what lies below added where the condition holds."""
        high, low = counts
        low = low + jnp.where(condition, self.below_low, 0)
        if not self.two_limbs:
            return high, low
        high = high + jnp.where(condition, self.below_high, 0) + (low >> LIMB)
        return high, low & ((1 << LIMB) - 1)

    def tighten(self, rank, thresholds, counts, ends):
        """The bracket after a pass.

        Args:
          rank: static. thresholds: (W,). counts: ((W,), (W,)) limbs of the numbers <= each
            threshold; with one limb the first is not read.
          ends: None, or whether they were looked for, the smallest number > low and the largest <= high.
        """
        high_limb, low_limb = counts
        if not self.two_limbs:
            above = low_limb >= rank
            upto_high, below_high = self.upto_high, self.below_high
            at_high, at_low = above, ~above
            old_upto, old_below = self.upto_low, self.below_low
        else:
            wanted_high, wanted_low = limbs(rank)
            above = high_limb > wanted_high
            above |= (high_limb == wanted_high) & (low_limb >= wanted_low)
            upto_high = jnp.minimum(self.upto_high, jnp.min(jnp.where(above, high_limb, NONE)))
            below_high = jnp.maximum(self.below_high, jnp.max(jnp.where(above, -1, high_limb)))
            at_high, at_low = above & (high_limb == upto_high), ~above & (high_limb == below_high)
            old_upto = jnp.where(self.upto_high == upto_high, self.upto_low, MANY)
            old_below = jnp.where(self.below_high == below_high, self.below_low, -1)
        # Counts grow with thresholds, so the tightest threshold has the tightest count.
        high = jnp.minimum(self.high, jnp.min(jnp.where(above, thresholds, NONE)))
        low = jnp.maximum(self.low, jnp.max(jnp.where(above, -1, thresholds)))
        upto_low = jnp.minimum(old_upto, jnp.min(jnp.where(at_high, low_limb, MANY)))
        below_low = jnp.maximum(old_below, jnp.max(jnp.where(at_low, low_limb, -1)))
        if ends is not None:
            looked_for, smallest, largest = ends
            smallest = jnp.where(looked_for, smallest, self.low + 1)
            largest = jnp.where(looked_for, largest, self.high)
            # The end of the old bracket that has the wanted rank is the answer.
            first = self._is(rank - 1, self.below_high, self.below_low)
            last = self._is(rank, self.upto_high, self.upto_low)
            answer = jnp.where(first, smallest, largest)
            known = looked_for & (first | last | (smallest >= largest))
            # The new one ends on numbers that occur; nothing lies between, so the counts hold.
            low, high = jnp.maximum(low, smallest - 1), jnp.minimum(high, largest)
            low, high = jnp.where(known, answer - 1, low), jnp.where(known, answer, high)
        new = Bracket(self.two_limbs, low, high, below_high, below_low, upto_high, upto_low)
        return new.where(self.open(), self)

    def _is(self, count, high, low):
        wanted_high, wanted_low = limbs(count) if self.two_limbs else (0, count)
        return (high == wanted_high) & (low == wanted_low)

    def steps(self, count):
        """(count,) thresholds at even steps."""
        b, j = power_of_two(count), jnp.arange(count)
        width = self.high - self.low
        steps = self.low + (width >> b) * j + (((width & (count - 1)) * j) >> b)
        return jnp.clip(steps, *self._within())

    def _within(self):
        return self.low + 1, jnp.maximum(self.high - 1, self.low + 1)

    def thresholds(self, rank, count, bits_left, sampled=None):
        """Thresholds of the next pass, (count,).

        Args:
          rank: static. count: a power of two. bits_left: those that the passes after it take off a bracket.
          sampled: None, or how many numbers a sample held of which this is the bracket and `rank` the rank:
            then the thresholds are for all numbers, and may lie outside.
        """
        j = jnp.arange(count)
        width = self.high - self.low
        inside = jnp.maximum(self.inside(), 1.0)
        place = jnp.clip((self._place(rank) - 0.5) / inside, 0.0, 1.0)
        start, end = from_u(jnp.maximum(self.low, 0)), from_u(self.high)
        if sampled is None:
            spread = jnp.sqrt(place * (1 - place) / inside) + 0.5 / inside
            # The density changes inside a wide bracket.
            spread += 0.02 * (end - start) / jnp.maximum(end, 1e-30)
        else:
            spread = 0.5 * math.sqrt(sampled) / inside
        centre = to_u(start + (end - start) * place)
        step_by_step = 4.0 * spread * width.astype(jnp.float32) < count
        fraction = place + spread * _offsets(count, 8.0, 3.0)
        if sampled is None:
            fraction = jnp.clip(fraction, 0.0, 1.0)
        guess = to_u(start + (end - start) * fraction)
        guess = jnp.where(step_by_step, centre + (j - count // 2), guess)
        if sampled is not None:
            return jnp.clip(guess, 0, TOP - 1)
        lowest, highest = self._within()
        # Ties gather at the ends.
        guess = jnp.where(j == 0, lowest, jnp.where(j == count - 1, highest, guess))
        even = (width > (1 << jnp.minimum(bits_left, RANGE_BITS))) | (width <= count)
        return jnp.where(even, self.steps(count), jnp.clip(guess, lowest, highest))

    def inside(self):
        """How many numbers lie in it, rounded to float32."""
        return _float(self.upto_high - self.below_high, self.upto_low - self.below_low)

    def _place(self, rank):
        high, low = limbs(rank) if self.two_limbs else (0, rank)
        return _float(high - self.below_high, low - self.below_low)


def first_thresholds(fraction, count, mean, variance):
    """Thresholds of the first pass around the quantile of a gamma distribution with these moments.

    Wilson and Hilferty 1931: its cube root is normal. Squared distances of normal particles are close to one.
    """
    deviation = jnp.sqrt(jnp.maximum(variance, 0.0))
    ratio = jnp.where(mean > 0, deviation / jnp.where(mean > 0, mean, 1.0), 0.0)
    ratio = ratio * ratio / 9.0
    normal = statistics.NormalDist().inv_cdf(min(max(fraction, 1e-6), 1 - 1e-6))
    root = jnp.maximum(1.0 - ratio + normal * jnp.sqrt(ratio), 0.0)
    guess = mean * root * root * root
    return jnp.minimum(to_u(guess + deviation * _offsets(count, 6.0, 6.0)), TOP - 1)


def _offsets(count, reach, bend):
    """(count,) from -reach to reach, dense around 0: a hyperbolic sine."""
    step = 2.0 * bend / (count - 1)
    grown = jnp.exp(jnp.arange(count).astype(jnp.float32) * step - bend)
    return (reach / (2.0 * math.sinh(bend))) * (grown - 1.0 / grown)


def _float(high, low):
    """high 2^16 + low in float32: for guesses, never for a decision."""
    return high.astype(jnp.float32) * float(1 << LIMB) + low.astype(jnp.float32)
