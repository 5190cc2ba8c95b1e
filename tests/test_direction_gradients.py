"""Gradients of the direction, to second order, in every implementation and under every transformation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsvgd
from tests.implementations import (
    COMPILED,
    IMPLEMENTATIONS,
    every_implementation,
    every_kernel,
    float64_implementation,
    objective,
    on_matrix_units,
    supported,
    tolerance,
)
from tests.problems import (
    bandwidth_for,
    draw,
    oracle_gradients,
    relative_error,
    wide,
)


@every_implementation
def test_gradient_in_repulsion(implementation):
    x, s = draw(97, 13)
    h = bandwidth_for(x)

    def value(function, repulsion):
        return jnp.sum(function(x, s, h, repulsion=repulsion) ** 2)

    direction = functools.partial(jsvgd.svgd_direction, implementation=implementation)
    got, expected = (
        jax.jit(jax.grad(functools.partial(value, way)))(1.3)
        for way in (direction, jsvgd.reference.direction)
    )
    np.testing.assert_allclose(got, expected, rtol=1e-4)


@every_implementation
@every_kernel
@pytest.mark.parametrize(("n", "d"), [(1, 3), (37, 11), (129, 65), (513, 2), (20, 501)])
def test_gradients_float32(implementation, kernel, n, d):
    supported(implementation, n, d, kernel)
    x, s = draw(n, d)
    weights = draw(n, d, seed=1)[1]
    h = bandwidth_for(x)
    got = jax.jit(
        jax.grad(objective(weights, kernel=kernel, implementation=implementation), (0, 1, 2))
    )(x, s, h)
    expected = oracle_gradients(x, s, h, weights, kernel=kernel)
    for value, right in zip(got, expected, strict=True):
        assert relative_error(value, right) <= 1e-4


@float64_implementation
@every_kernel
def test_gradients_float64(implementation, kernel, x64):
    x, s = draw(131, 17, dtype=np.float64)
    weights = draw(131, 17, seed=1, dtype=np.float64)[1]
    h = wide(bandwidth_for(x))
    got = jax.grad(objective(weights, kernel=kernel, implementation=implementation), (0, 1, 2))
    expected = oracle_gradients(x, s, h, weights, kernel=kernel)
    for value, right in zip(jax.jit(got)(x, s, h), expected, strict=True):
        assert relative_error(value, right) <= 1e-9


@every_implementation
def test_gradients_of_far_clusters(implementation):
    n, d = 143, 7
    x, s = draw(n, d)
    x = (x + 300 * np.where(np.arange(n) % 3 == 0, 1, -1)[:, None]).astype(np.float32)
    weights = draw(n, d, seed=1)[1]
    got = jax.grad(objective(weights, implementation=implementation), (0, 1, 2))
    expected = oracle_gradients(x, s, np.float32(2.0), weights)
    for value, right in zip(jax.jit(got)(x, s, np.float32(2.0)), expected, strict=True):
        assert relative_error(value, right) <= 1e-3


@every_implementation
@pytest.mark.parametrize("per_dimension", [False, True])
@pytest.mark.parametrize("with_queries", [False, True])
def test_bandwidth_gradient_of_two_clusters(implementation, per_dimension, with_queries):
    """Its sums cancel long before the direction loses digits."""
    if implementation == "interpret" and with_queries:
        pytest.skip("the gradient with queries of their own is XLA's, whatever makes the direction")
    n, d = 66, 5
    supported(implementation, n, d)
    start, s = draw(n, d)
    h = np.float32([0.7, 1.0, 1.3, 1.1, 0.9]) if per_dimension else np.float32(1.0)
    weights = draw(n, d, seed=3)[1]

    @jax.jit
    def gradient(x, s, h, queries):
        value = objective(weights, implementation=implementation, queries=queries)
        return jax.grad(value, 2)(x, s, h)

    allowed = 5e-4 if on_matrix_units(implementation) else 1e-4  # the sums cancel
    for distance in (5.0, 15.0, 30.0, 46.0, 100.0):
        x = start.copy()
        x[: n // 2] += np.float32(distance)
        queries = x if with_queries else None
        expected = oracle_gradients(x, s, h, weights, queries=queries)[2]
        assert relative_error(gradient(x, s, h, queries), expected) <= allowed, distance


@every_kernel
@pytest.mark.parametrize(("distance", "d"), [(5, 1), (20, 5), (40, 1)])
def test_gradient_in_the_bandwidth_of_separate_clusters(kernel, distance, d):
    n = 200
    x, s = draw(n, d)
    x = (x + distance * np.where(np.arange(n) % 3 == 0, 1, -1)[:, None]).astype(np.float32)
    h = np.float32(1.0)
    for seed in range(1, 5):
        weights = draw(n, d, seed=seed)[1]
        got = jax.grad(objective(weights, kernel=kernel), 2)(x, s, h)
        expected = oracle_gradients(x, s, h, weights, kernel=kernel)[2]
        terms = np.abs(wide(weights)).sum() / n  # what the sum is made of, for sums that cancel
        assert abs(float(got) - expected) <= 1e-4 * max(abs(expected), 0.01 * terms)


@float64_implementation
@every_kernel
def test_second_order(implementation, kernel, x64):
    x, s = draw(23, 5, dtype=np.float64)
    weights = draw(23, 5, seed=1, dtype=np.float64)[1]

    def norm_of_gradient(function, x, s, h):
        def value(x, s, h):
            return jnp.sum(weights * function(x, s, h, kernel=kernel))

        return sum(jnp.sum(g**2) for g in jax.grad(value, (0, 1, 2))(x, s, h))

    direction = functools.partial(jsvgd.svgd_direction, implementation=implementation)
    got, expected = (
        jax.jit(jax.grad(functools.partial(norm_of_gradient, way), (0, 1, 2)))(x, s, 1.7)
        for way in (direction, jsvgd.reference.direction)
    )
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) <= 1e-9


@pytest.mark.parametrize("implementation", ["interpret", *COMPILED])
def test_second_order_of_compiled_gradients(implementation):
    """A compiled gradient has no derivative of its own: XLA's streamed one stands in."""
    n, d = 67, 12
    supported(implementation, n, d)
    x, s = draw(n, d)
    h = bandwidth_for(x)
    weights = draw(n, d, seed=1)[1]

    def norm_of_gradient(implementation, x, s, h):
        value = objective(weights, implementation=implementation)
        return sum(jnp.sum(g**2) for g in jax.grad(value, (0, 1, 2))(x, s, h))

    got, expected = (
        jax.jit(jax.grad(functools.partial(norm_of_gradient, way), (0, 1, 2)))(x, s, h)
        for way in (implementation, "xla")
    )
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) <= 2e-4


# The rules of batching know no kernel: the second one in what a user gets is enough.
@pytest.mark.parametrize(
    ("kernel", "implementation"),
    [
        *(("rbf", implementation) for implementation in IMPLEMENTATIONS),
        *(("imq", implementation) for implementation in (None, *COMPILED)),
    ],
)
def test_transformations_agree(implementation, kernel):
    supported(implementation, 67, 9, kernel)
    chains, n, d = 3, 67, 9
    x, s = (np.stack(a) for a in zip(*(draw(n, d, seed=i) for i in range(chains)), strict=True))
    h = np.float32([1.0, 2.5, 7.0])
    weights = draw(n, d, seed=9)[1]
    options = {"kernel": kernel, "implementation": implementation}
    direction = functools.partial(jsvgd.svgd_direction, **options)
    alone = np.stack([direction(x[i], s[i], h[i]) for i in range(chains)])
    np.testing.assert_allclose(jax.jit(jax.vmap(direction))(x, s, h), alone, rtol=1e-5, atol=1e-6)
    _, scanned = jax.lax.scan(lambda _, a: (None, direction(*a)), None, (x, s, h))
    np.testing.assert_allclose(scanned, alone, rtol=1e-5, atol=1e-6)
    shared = jax.vmap(direction, in_axes=(None, 0, None))(x[0], s, h[0])
    expected = np.stack([direction(x[0], s[i], h[0]) for i in range(chains)])
    np.testing.assert_allclose(shared, expected, rtol=1e-5, atol=1e-6)

    value = objective(weights, **options)
    gradient = jax.grad(value, (0, 1, 2))
    alone = [gradient(x[i], s[i], h[i]) for i in range(chains)]
    alone = [np.stack(parts) for parts in zip(*alone, strict=True)]
    vmap_of_grad = jax.jit(jax.vmap(gradient))(x, s, h)
    grad_of_vmap = jax.grad(lambda *a: jnp.sum(jax.vmap(value)(*a)), (0, 1, 2))(x, s, h)
    _, scan_of_grad = jax.lax.scan(lambda _, a: (None, gradient(*a)), None, (x, s, h))
    remat = jax.vmap(jax.grad(jax.checkpoint(value), (0, 1, 2)))(x, s, h)
    for transformed in (vmap_of_grad, grad_of_vmap, scan_of_grad, remat):
        for got, expected in zip(transformed, alone, strict=True):
            # One bit of difference in an operand may move a product of 16-bit parts by its error.
            allowed = 1e-5 if not on_matrix_units(implementation) else tolerance(implementation)
            assert relative_error(got, expected) <= allowed


def test_forward_mode_through_xla_and_a_clear_error_without():
    x, s = draw(41, 5)
    tangent = draw(41, 5, seed=1)[0]

    def at(implementation):
        return lambda x: jsvgd.svgd_direction(x, s, 2.0, implementation=implementation)

    _, got = jax.jvp(at("xla"), (x,), (tangent,))
    _, expected = jax.jvp(at("dense"), (x,), (tangent,))
    assert relative_error(got, expected) <= 1e-5
    with pytest.raises(TypeError, match='implementation="xla"'):
        jax.jvp(at(None), (x,), (tangent,))
