"""Networks and parameters that the tests of ``jsvgd.flax`` share."""

import numpy as np
from flax import linen

RNG = np.random.default_rng(0)
PARAMS = {
    "hidden": {"kernel": RNG.normal(size=(3, 2)), "bias": RNG.normal(size=2)},
    "output": {"kernel": RNG.normal(size=(2, 1)) * 5},
}
INPUTS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


class LinenNetwork(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(linen.tanh(linen.Dense(4)(x)))
