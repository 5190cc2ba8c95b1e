"""Log densities that the tests of ``fit`` share, and particles to start from."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np

from jsvgd.fit import fit

KEY = jax.random.key(0)
SCALES = jnp.array([1e-3, 1.0, 1e3])


def normal(n, d, *, seed=0, scale=1.0, offset=0.0):
    return jnp.asarray(
        np.random.default_rng(seed).normal(size=(n, d)) * scale + offset, jnp.float32
    )


def quiet(*args, **kwargs):
    """``fit`` where the warnings are looked at in the result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return fit(KEY, *args, **kwargs)


def standard(x):
    return -0.5 * jnp.sum(x**2)


def badly_scaled(x):
    return standard((x - 5 * SCALES) / SCALES)
