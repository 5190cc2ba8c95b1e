"""The static choices of a search for order statistics: its launches, and how each counts.

A guessing pass has W thresholds around the place where the wanted distance is thought to be; two or three
do, mostly. Since XLA cannot end a search early without the host, all the launches that the worst case
takes are always there, and return at once when nothing is left to do. With few particles launches are
what a search costs: there two guesses and three wide passes, with 1024 bins each, are enough.

Measured on one H200 (JAX 0.11.2), a median, microseconds from first to last kernel in `jax.profiler.trace`
around `triton_rank.order_statistics(x, ranks, search=...)`:

                normal particles    two far clusters    three tight ones    all coordinates rounded
    1024 x 32   28.2                33.6                86                  86
    1000 x 3    25.3                28.6                92                  92
    2048 x 64   76.6                129                 132                 52
    4096 x 64   124
    16384 x 64  752

Clusters: standard normal around -3 or 3 in every coordinate, and 1e-3 as wide around 0, 10 or 20.

`python -m experiments.benchmark_bandwidth` times calls in a loop. Tried:

    n <= 1024   16 thresholds instead of 32: 26.8, but 62 with two clusters; seven passes of 32 thresholds
                with ends: 36.4; two to eight warps: slower
    n = 2048    wide passes: 49, but 153 with two clusters and 222 with three tight ones
    n > 1024    by threshold alone, where few are inside too: 84.2 (2048), 143 (4096), 812 (16384)
"""

import dataclasses

from pallas_kernels import triton_tiles as tiles
from pallas_kernels.triton_rank_bracket import passes, power_of_two
from pallas_kernels.triton_rank_tiles import Layout
from pallas_kernels.triton_rank_wide import BINS, BITS

DIGITS = 12  # bits of a count in each of its counters


@dataclasses.dataclass(frozen=True)
class Search:
    """Static choices.

    Attributes:
      thresholds: of each rank in a guessing pass.
      sample: offsets of the sampled tiles; 0: there is no sample.
      splits: programs that share the offsets of a block.
      ends: the pass over everything, counted from 0, from which on one also finds the smallest and the
        largest distance inside a bracket; None: none does.
      one_by_one: whether a tile is counted threshold by threshold (`triton_rank_count`).
      few: where no more distances than this lie inside the brackets, tiles are counted by value.
      wide: how many passes with many bins (`triton_rank_wide`) end the search.
      stages: of Triton's pipeline.
    """

    layout: Layout
    thresholds: int
    sample: int
    splits: int
    ends: int | None = 1
    one_by_one: bool = False
    few: int = 0
    wide: int = 0
    stages: int = 2

    @property
    def kinds(self):
        """Of each launch: see `_pass`."""
        kinds = ["start"] + ["next"] * (self.guessing - 1) + ["wide"] * self.wide
        return ["start_sample", "next_sample", "turn", *kinds[1:]] if self.sample else kinds

    @property
    def guessing(self):
        """Passes over everything before the wide ones: at least two, which mostly leave few inside."""
        return max(2, passes(self.thresholds, self.wide * BITS))

    def bits_left(self, done):
        """Bits that even steps and bins take off a bracket after `done` of the guessing passes."""
        return power_of_two(self.thresholds) * (self.guessing - done) + self.wide * BITS

    def width(self, kind):
        """Thresholds, or bins, of a pass."""
        return BINS if kind == "wide" else self.thresholds

    @property
    def limbs(self):
        """Float32 counters a count is cut into: no sum in one of them passes 2^24."""
        return 1 if self.total < 1 << 24 else 2 if self.total < 1 << (24 + DIGITS) else 3

    @property
    def two_limbs(self):
        return self.total >= 1 << 31

    @property
    def total(self):
        return self.layout.n * (self.layout.n - 1) // 2

    @property
    def sampled(self):
        return self.layout.pairs_within(self.sample)


def over_sample(kind):
    """Whether a pass of this kind visits the sampled tiles alone."""
    return kind.endswith("_sample")


def plan(n, d, interpret=False):
    """The static choices for n particles in d dimensions.

    Few particles: a launch and its code cost more than its compares. Many: as many programs as run at
    once, since each makes the thresholds anew.
    """
    if n <= 1024:
        size, warps, thresholds, sample, programs, ends, wide = 32, 1, 32, 0, 5, None, 3
    elif n <= 2048:
        size, warps, thresholds, sample, programs, ends, wide = 64, 4, 16, 0, 2, 1, 0
    elif n <= 8192:
        size, warps, thresholds, sample, programs, ends, wide = 64, 4, 16, 4, 2, 1, 0
    else:
        size, warps, thresholds, sample, programs, ends, wide = 128, 8, 16, 2, 1, 2, 0
    layout = Layout(n, d, size, warps, interpret)
    splits = min(layout.offsets, max(1, programs * tiles.MULTIPROCESSORS // layout.blocks))
    few = 0 if wide else 2 * layout.blocks * layout.offsets
    if interpret:  # which compiles every compare, and every branch, anew
        thresholds, few = 8, 0
    return Search(layout, thresholds, sample, splits, ends, n <= 1024, few, wide)
