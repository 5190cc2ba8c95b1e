"""Inputs, the float64 oracle on exactly those inputs, and the two measures of rounding error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jsvgd import reference


def draw(n, d, *, seed=0, offset=0.0, scale=1.0, dtype=np.float32):
    """Particles N(offset, scale^2 I) and the scores of N(offset, scale^2 I) with a little noise."""
    rng = np.random.default_rng([seed, n, d])
    x = rng.normal(size=(n, d)) * scale + offset
    s = -(x - offset) / scale**2 + 0.1 * rng.normal(size=(n, d))
    return x.astype(dtype), s.astype(dtype)


def bandwidth_for(x):
    """About what the median rule gives on N(0, I), without its cost."""
    n, d = x.shape
    variance = np.var(np.asarray(x, np.float64), axis=0).mean() if n > 1 else 1.0
    return np.float32(2 * d * max(variance, 1e-3) / max(np.log(n), 1.0))


# Compiled whole, and once for all implementations that are held against it.
_direction = jax.jit(reference.direction, static_argnames="kernel")


@functools.partial(jax.jit, static_argnames="kernel")
def _gradients(cotangent, inputs, kernel="rbf"):
    def objective(inputs):
        return jnp.sum(cotangent * reference.direction(**inputs, kernel=kernel))

    return jax.grad(objective)(inputs)


def oracle(x, s, h, **options):
    """``jsvgd.reference.direction`` in float64."""
    options = {k: wide(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    with jax.enable_x64(True):
        return np.asarray(_direction(wide(x), wide(s), wide(h), **options))


def oracle_gradients(x, s, h, cotangent, *, kernel="rbf", **others):
    """Gradients of sum(cotangent * direction) in x, s, h and any others, in float64."""
    inputs = {"particles": x, "scores": s, "bandwidth": h, **others}
    with jax.enable_x64(True):
        found = _gradients(wide(cotangent), jax.tree.map(wide, inputs), kernel=kernel)
    return [np.asarray(found[name]) for name in inputs]


def wide(a):
    return np.asarray(a, np.float64)


def relative_error(value, expected):
    """||value - expected|| / ||expected||."""
    value, expected = wide(value), wide(expected)
    assert value.shape == expected.shape
    scale = np.linalg.norm(expected)
    return np.linalg.norm(value - expected) / (scale if scale > 0 else 1.0)


def termwise_error(value, expected, x, s, h):
    """max |value - expected| / the sum of the terms' magnitudes: phi cancels, its terms do not."""
    x, s, h = wide(x), wide(s), wide(h)
    difference = x[:, None] - x[None]
    k = np.exp(-np.sum(difference**2 / (2 * h), axis=-1))
    terms = (k @ np.abs(s) + np.sum(k[..., None] * np.abs(difference), axis=1) / h) / len(x)
    return np.max(np.abs(wide(value) - expected) / terms)


def network_particles(n=20, dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "weights": (jax.random.normal(keys[0], (n, 3, 2)) + 3).astype(dtype),
        "bias": jax.random.normal(keys[1], (n, 2)).astype(dtype),
        "log_scale": jax.random.normal(keys[2], (n,)).astype(dtype),
    }


def as_matrix(particles):
    leaves = jax.tree.leaves(particles)
    return np.concatenate([np.asarray(a, np.float64).reshape(len(a), -1) for a in leaves], axis=1)


def assert_trees_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def standard_normal(position, *args):
    return -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(position))
