"""The shared suite: every implementation answers the same questions as the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsvgd
from tests.implementations import (
    COMPILED,
    PRODUCTS_IN_FLOAT32,
    every_implementation,
    every_kernel,
    float64_implementation,
    objective,
    supported,
    tolerance,
)
from tests.problems import (
    bandwidth_for,
    draw,
    oracle,
    oracle_gradients,
    relative_error,
    termwise_error,
    wide,
)

SHAPES = [
    (1, 1),
    (1, 7),
    (2, 3),
    (3, 129),
    (13, 5),
    (37, 11),
    (100, 50),
    (129, 65),
    (257, 31),
    (311, 1),
    (513, 2),
    (777, 19),
    (1001, 3),
    (20, 501),
    (64, 1500),
]


@pytest.mark.parametrize("implementation", ["xla", "interpret", *COMPILED])
@pytest.mark.parametrize(("n", "d"), SHAPES)
def test_float32_against_the_oracle(implementation, n, d):
    if implementation == "interpret" and n * d > 12_000:
        pytest.skip("the interpreter is too slow for it; smaller ragged shapes stand beside it")
    check_float32(implementation, "rbf", n, d)


@every_implementation
@every_kernel
@pytest.mark.parametrize(("n", "d"), [(13, 5), (257, 31)])
def test_float32_against_the_oracle_for_every_kernel(implementation, kernel, n, d):
    check_float32(implementation, kernel, n, d)


def check_float32(implementation, kernel, n, d):
    supported(implementation, n, d, kernel)
    x, s = draw(n, d)
    h = bandwidth_for(x)
    phi = jsvgd.svgd_direction(x, s, h, kernel=kernel, implementation=implementation)
    expected = oracle(x, s, h, kernel=kernel)
    assert phi.dtype == jnp.float32
    assert relative_error(phi, expected) <= tolerance(implementation)
    if kernel == "rbf":
        # Products of 16-bit parts lose up to 2^-16 of a term; many terms average it out.
        whole = implementation in PRODUCTS_IN_FLOAT32
        allowed = 3e-6 if whole or n >= 1000 else 2.5e-5
        assert termwise_error(phi, expected, x, s, h) <= allowed


@float64_implementation
@every_kernel
@pytest.mark.parametrize(("n", "d"), [(1, 3), (37, 11), (129, 65), (513, 2), (20, 501)])
def test_float64_against_the_oracle(implementation, kernel, n, d, x64):
    x, s = draw(n, d, dtype=np.float64)
    h = wide(bandwidth_for(x))
    phi = jsvgd.svgd_direction(x, s, h, kernel=kernel, implementation=implementation)
    assert phi.dtype == jnp.float64
    assert relative_error(phi, oracle(x, s, h, kernel=kernel)) <= 1e-12


@every_implementation
@every_kernel
def test_one_particle_follows_its_score(implementation, kernel):
    supported(implementation, 1, 5, kernel)
    x, s = draw(1, 5)
    phi = jsvgd.svgd_direction(x, s, 0.7, kernel=kernel, implementation=implementation)
    np.testing.assert_allclose(phi, s, rtol=1e-6)


@every_implementation
@every_kernel
def test_coincident_particles_do_not_repel(implementation, kernel):
    supported(implementation, 67, 5, kernel)
    x = np.full((67, 5), 3.25, np.float32)
    _, s = draw(67, 5)
    phi = jsvgd.svgd_direction(x, s, 1e-5, kernel=kernel, implementation=implementation)
    np.testing.assert_allclose(phi, np.broadcast_to(s.mean(axis=0), s.shape), atol=1e-6)
    gradient = jax.jit(jax.grad(objective(s, kernel=kernel, implementation=implementation)))
    assert np.all(np.isfinite(gradient(x, s, np.float32(1.0))))


@every_implementation
@every_kernel
def test_bandwidth_a_dimension(implementation, kernel):
    supported(implementation, 97, 13, kernel)
    x, s = draw(97, 13)
    h = np.geomspace(0.5, 50, 13).astype(np.float32)
    direction = functools.partial(
        jsvgd.svgd_direction, kernel=kernel, implementation=implementation
    )
    assert relative_error(direction(x, s, h), oracle(x, s, h, kernel=kernel)) <= tolerance(
        implementation
    )
    weights = draw(97, 13, seed=1)[1]
    gradient = jax.grad(objective(weights, kernel=kernel, implementation=implementation), (0, 1, 2))
    for value, expected in zip(
        jax.jit(gradient)(x, s, h), oracle_gradients(x, s, h, weights, kernel=kernel), strict=True
    ):
        assert relative_error(value, expected) <= 1e-4


@every_implementation
@every_kernel
@pytest.mark.parametrize("m", [1, 43, 131])
def test_queries(implementation, kernel, m):
    supported(implementation, 97, 13, kernel)
    x, s = draw(97, 13)
    y, weights = draw(m, 13, seed=1)
    h = bandwidth_for(x)
    direction = functools.partial(
        jsvgd.svgd_direction, kernel=kernel, implementation=implementation
    )
    phi = direction(x, s, h, queries=y)
    assert relative_error(phi, oracle(x, s, h, queries=y, kernel=kernel)) <= tolerance(
        implementation
    )

    if implementation == "interpret" and m != 43:
        return  # that of kernels is XLA's gradient, whatever makes the direction

    def value(x, s, h, y):
        return jnp.sum(weights * direction(x, s, h, queries=y))

    got = jax.jit(jax.grad(value, (0, 1, 2, 3)))(x, s, h, y)
    expected = oracle_gradients(x, s, h, weights, queries=y, kernel=kernel)
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) <= 1e-4


@every_implementation
@pytest.mark.parametrize("repulsion", [-1.0, 0.0, 2.5])
def test_repulsion(implementation, repulsion):
    x, s = draw(97, 13)
    h = bandwidth_for(x)
    phi = jsvgd.svgd_direction(x, s, h, repulsion=repulsion, implementation=implementation)
    assert relative_error(phi, oracle(x, s, h, repulsion=repulsion)) <= tolerance(implementation)


@every_implementation
def test_bfloat16_is_computed_in_float32(implementation):
    x, s = (jnp.asarray(a, jnp.bfloat16) for a in draw(97, 13))
    h = jnp.bfloat16(4.0)
    phi = jsvgd.svgd_direction(x, s, h, implementation=implementation)
    assert phi.dtype == jnp.bfloat16
    expected = oracle(*(np.asarray(a, np.float64) for a in (x, s, h)))
    assert relative_error(np.asarray(phi, np.float32), expected) <= 3e-3  # the last rounding alone
    total = lambda *a: jsvgd.svgd_direction(*a, implementation=implementation).astype(float).sum()
    gradients = jax.jit(jax.grad(total, (0, 1, 2)))(x, s, h)
    assert [g.dtype for g in gradients] == [jnp.bfloat16] * 3


@every_implementation
def test_update_moves_along_the_direction(implementation):
    x, s = draw(97, 13)
    h = bandwidth_for(x)
    weights = draw(97, 13, seed=1)[1]
    moved = jsvgd.svgd_update(x, s, h, 0.3, implementation=implementation)
    np.testing.assert_allclose(moved, x + 0.3 * oracle(x, s, h), rtol=1e-5, atol=1e-5)

    def value(update, x, step_size):
        return jnp.sum(weights * update(x, s, h, step_size))

    update = functools.partial(jsvgd.svgd_update, implementation=implementation)
    got, expected = (
        jax.jit(jax.grad(functools.partial(value, way), (0, 1)))(x, 0.3)
        for way in (update, jsvgd.reference.update)
    )
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) <= 1e-4


@every_implementation
def test_the_inputs_stay_as_they_are(implementation):
    x, s = draw(67, 3)
    kept = x.copy(), s.copy()
    jsvgd.svgd_update(x, s, 1.0, 0.3, implementation=implementation)
    np.testing.assert_array_equal(x, kept[0])
    np.testing.assert_array_equal(s, kept[1])


@pytest.mark.skipif(
    jax.default_backend() != "gpu",
    reason="the kernel that sums runs of steps exists on a GPU alone; its body is emulated elsewhere",
)
@pytest.mark.parametrize("d", [190, 256])
def test_many_particles_in_many_dimensions_on_a_gpu(d):
    """A step that is lost, now and then, changes bits between calls or a row's value."""
    x, s = draw(16384, d)
    h = jnp.float32(2 * d / np.log(len(x)))
    direction = jax.jit(jsvgd.svgd_direction)
    first = np.asarray(direction(x, s, h))
    exact = np.asarray(jsvgd.svgd_direction(x, s, h, implementation="xla"))
    rows = np.linalg.norm(first - exact, axis=1) / np.linalg.norm(exact, axis=1).mean()
    assert rows.max() <= 1e-4
    for _ in range(10):
        np.testing.assert_array_equal(direction(x, s, h), first)


@every_implementation
@pytest.mark.parametrize(("n", "d"), [(131, 3), (131, 17), (67, 300)])
def test_same_bits_in_ten_runs_over_poisoned_memory(implementation, n, d):
    """Nothing is added in an order that changes, and every element is written."""
    supported(implementation, n, d)
    x, s = draw(n, d)
    h = bandwidth_for(x)
    weights = draw(n, d, seed=1)[1]
    direction = functools.partial(jsvgd.svgd_direction, implementation=implementation)

    @jax.jit
    def work(*inputs):
        phi, pullback = jax.vjp(direction, *inputs)
        return phi, pullback(weights)

    first = jax.tree.map(np.asarray, work(x, s, h))
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(first))
    for _ in range(10):
        # What is freed here is what the next call gets for its results.
        poison = [jnp.full((rows, d), jnp.nan) for rows in (n, n, 2 * n, 8 * n)]
        jax.block_until_ready(poison)
        del poison
        jax.tree.map(np.testing.assert_array_equal, work(x, s, h), first)


@every_implementation
@pytest.mark.parametrize("d", [3, 17])
def test_nan_particles_show_in_the_result(implementation, d):
    x, s = draw(67, d)
    x[4, 1] = np.nan
    assert np.isnan(jsvgd.svgd_direction(x, s, 1.0, implementation=implementation)).all()


def test_own_radial_kernel():
    student = jsvgd.RadialKernel("student", lambda u: 1 / (1 + u))
    x, s = draw(97, 13)
    weights = draw(97, 13, seed=1)[1]
    h = bandwidth_for(x)
    phi = jsvgd.svgd_direction(x, s, h, kernel=student)
    assert relative_error(phi, oracle(x, s, h, kernel=student)) <= 2e-5
    got = jax.jit(jax.grad(objective(weights, kernel=student), (0, 1, 2)))(x, s, h)
    expected = oracle_gradients(x, s, h, weights, kernel=student)
    for value, right in zip(got, expected, strict=True):
        assert relative_error(value, right) <= 1e-4
