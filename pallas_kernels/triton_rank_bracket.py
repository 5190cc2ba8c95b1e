"""The bracket of a search for the number of a given rank, inside a kernel, from counts.

Numbers u >= 0 are squared distances as integers: 0 below 2^-96, else the bits of the float minus those of the
number below 2^-96. The wanted one lies in (low, high]; `below` counts numbers <= low and `upto` numbers <= high.
Counts are pairs (high limb, low limb) in base 2^16, since they pass 2^31.

    even        2^b thresholds at equal steps in u: whatever the numbers, a pass takes b bits off the bracket
    guessed     thresholds around the interpolated place of the rank, dense near it: two passes do, mostly

A pass may guess only while the passes that remain could finish by even steps alone.
"""

import math
import statistics

import jax.numpy as jnp

from pallas_kernels.triton_rank_tiles import bits, number

LEAST = (127 - 96) << 23  # bits of 2^-96: smaller distances count as 0
TOP = (96 + 28) << 23  # no squared distance is larger, in coordinates below 2^8 and up to 2^9 dimensions
RANGE_BITS = 30  # TOP < 2^30
LIMB = 16
NONE = 1 << 30


def to_u(x):
    return jnp.maximum(bits(x), LEAST - 1) - (LEAST - 1)


def from_u(u):
    return number(jnp.where(u > 0, u + (LEAST - 1), 0))


def passes(thresholds):
    """How many passes always suffice, the first of them free to guess."""
    b = thresholds.bit_length() - 1
    return 1 + -(-RANGE_BITS // b)


def limbs(value):
    return value >> LIMB, value & ((1 << LIMB) - 1)


class Bracket:
    """The bracket of one rank, as traced int32 scalars."""

    FIELDS = ("low", "high", "below_high", "below_low", "upto_high", "upto_low")

    def __init__(self, *values):
        for name, value in zip(self.FIELDS, values, strict=True):
            setattr(self, name, value)

    @classmethod
    def whole(cls, total, zero):
        """The bracket of which nothing is known but how many numbers there are."""
        high, low = limbs(total)
        return cls(zero - 1, zero + TOP, zero, zero, zero + high, zero + low)

    def values(self):
        return [getattr(self, name) for name in self.FIELDS]

    def where(self, condition, other):
        """self where the condition holds, else other."""
        return Bracket(
            *(jnp.where(condition, a, b) for a, b in zip(self.values(), other.values(), strict=True))
        )

    def open(self):
        return self.high - self.low > 1

    def inside(self):
        return _float(self.upto_high - self.below_high, self.upto_low - self.below_low)

    def tighten(self, rank, thresholds, counts, smallest, largest):
        """The bracket after a pass.

        Args:
          rank: static. thresholds: (W,). counts: ((W,), (W,)) limbs of the numbers <= each threshold.
          smallest: the smallest number > low; largest: the largest <= high.
        """
        wanted_high, wanted_low = limbs(rank)
        high_limb, low_limb = counts
        above = (high_limb > wanted_high) | ((high_limb == wanted_high) & (low_limb >= wanted_low))
        high = jnp.min(jnp.where(above, jnp.minimum(thresholds, self.high), self.high))
        low = jnp.max(jnp.where(above, self.low, jnp.maximum(thresholds, self.low)))
        at_high, at_low = above & (thresholds == high), ~above & (thresholds == low)

        def counted(here, limb):
            return jnp.max(jnp.where(here, limb, -1))

        lower, raised = high < self.high, low > self.low
        below_high = jnp.where(raised, counted(at_low, high_limb), self.below_high)
        below_low = jnp.where(raised, counted(at_low, low_limb), self.below_low)
        upto_high = jnp.where(lower, counted(at_high, high_limb), self.upto_high)
        upto_low = jnp.where(lower, counted(at_high, low_limb), self.upto_low)
        # The end of the old bracket that has the wanted rank is the answer.
        before_high, before_low = limbs(rank - 1)
        first = (self.below_high == before_high) & (self.below_low == before_low)
        last = (self.upto_high == wanted_high) & (self.upto_low == wanted_low)
        answer = jnp.where(first, smallest, largest)
        known = first | last | (smallest >= largest)
        # The new one ends on numbers that occur; nothing lies between, so the counts hold.
        low, high = jnp.maximum(low, smallest - 1), jnp.minimum(high, largest)
        low, high = jnp.where(known, answer - 1, low), jnp.where(known, answer, high)
        done = ~self.open()
        return Bracket(
            jnp.where(done, self.low, low),
            jnp.where(done, self.high, high),
            below_high, below_low, upto_high, upto_low,
        )  # fmt: skip

    def thresholds(self, rank, count, passes_left, sampled=None):
        """Thresholds of the next pass, `count` scalars.

        Args:
          rank: static. count: a power of two. passes_left: after the next one.
          sampled: None, or how many numbers a sample held of which this is the bracket and `rank` the rank:
            then the thresholds are for all numbers, and may lie outside.
        """
        b = count.bit_length() - 1
        width = self.high - self.low
        even = (width > (1 << jnp.minimum(b * passes_left, RANGE_BITS))) | (width <= count)
        inside = jnp.maximum(self.inside(), 1.0)
        wanted_high, wanted_low = limbs(rank)
        place = _float(wanted_high - self.below_high, wanted_low - self.below_low)
        place = jnp.clip((place - 0.5) / inside, 0.0, 1.0)
        start, end = from_u(jnp.maximum(self.low, 0)), from_u(self.high)
        if sampled is None:
            spread = jnp.sqrt(place * (1 - place) / inside) + 0.5 / inside
            # The density changes inside a wide bracket.
            spread += 0.02 * (end - start) / jnp.maximum(end, 1e-30)
        else:
            spread = 0.5 * math.sqrt(sampled) / inside
        centre = to_u(start + (end - start) * place)
        step_by_step = 4.0 * spread * width.astype(jnp.float32) < count
        lowest, highest = self.low + 1, jnp.maximum(self.high - 1, self.low + 1)
        steps, rest = width >> b, width & (count - 1)
        found = []
        for j, offset in enumerate(_offsets(count, 8.0, 3.0)):
            fraction = place + spread * offset
            if sampled is None:
                fraction = jnp.clip(fraction, 0.0, 1.0)
            guess = to_u(start + (end - start) * fraction)
            guess = jnp.where(step_by_step, centre + (j - count // 2), guess)
            guess = jnp.clip(guess, 0, TOP - 1)
            if sampled is None:
                # Ties gather at the ends.
                guess = lowest if j == 0 else highest if j == count - 1 else guess
                guess = jnp.where(even, self.low + steps * j + ((rest * j) >> b), guess)
                guess = jnp.clip(guess, lowest, highest)
            found.append(guess)
        return found


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
    return [
        jnp.minimum(to_u(guess + deviation * offset), TOP - 1)
        for offset in _offsets(count, 6.0, 6.0)
    ]


def _offsets(count, reach, bend):
    """From -reach to reach, dense around 0."""
    middle = (count - 1) / 2
    return [reach * math.sinh(bend * (j - middle) / middle) / math.sinh(bend) for j in range(count)]


def _float(high, low):
    """high 2^16 + low in float32: for guesses, never for a decision."""
    return high.astype(jnp.float32) * float(1 << LIMB) + low.astype(jnp.float32)
