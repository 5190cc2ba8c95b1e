"""The shared suite: every implementation answers the same questions as the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsvgd
from tests.problems import (
    bandwidth_for,
    draw,
    oracle,
    oracle_gradients,
    relative_error,
    termwise_error,
    wide,
)

ON_GPU = jax.default_backend() == "gpu"
COMPILED = ["triton", "mosaic_gpu"] if ON_GPU else []
IMPLEMENTATIONS = [None, "xla", "interpret", *COMPILED]
PRODUCTS_IN_FLOAT32 = {"xla", "dense"} | (set() if ON_GPU else {None})
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

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
float64_implementation = pytest.mark.parametrize("implementation", [None, "xla", "dense"])
every_kernel = pytest.mark.parametrize("kernel", ["rbf", "imq"])


def supported(implementation, n, d, kernel="rbf"):
    """Skips what the Hopper kernels decline by design; without a name the op falls back."""
    if implementation == "mosaic_gpu":
        takes, why_not = jsvgd.dispatch.supports(
            implementation,
            n,
            d,
            dtype=jnp.float32,
            kernel=jsvgd.kernels.get_kernel(kernel),
            precision="high",
        )
        if not takes:
            pytest.skip(why_not)


def tolerance(implementation):
    """Relative error of "high": IEEE products, or three products of 16-bit parts."""
    return 2e-5 if implementation in PRODUCTS_IN_FLOAT32 else 4e-5


def on_matrix_units(implementation):
    """Whether 16-bit parts meet a GPU's own rounding; the interpreter's products are IEEE ones."""
    return ON_GPU and implementation not in ("xla", "dense", "interpret")


def objective(weights, **options):
    def value(x, s, h):
        return jnp.sum(weights * jsvgd.svgd_direction(x, s, h, **options))

    return value


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
@pytest.mark.parametrize("offset", [1.0, 1e2, 1e4])
@pytest.mark.parametrize(("n", "d"), [(129, 65), (513, 2)])
def test_far_from_the_origin(implementation, offset, n, d):
    x, s = draw(n, d, offset=offset)
    h = bandwidth_for(x)
    phi = jsvgd.svgd_direction(x, s, h, implementation=implementation)
    assert relative_error(phi, oracle(x, s, h)) <= tolerance(implementation)


@pytest.mark.parametrize("implementation", [None, "xla", *COMPILED])
@pytest.mark.parametrize(("n", "d"), [(3, 2), (100, 10), (1000, 3)])
@pytest.mark.parametrize("m", [1, 37])
def test_queries_far_from_the_origin(implementation, n, d, m):
    """Particles and queries must be centred by the same bits, alone and under vmap."""
    supported(implementation, n, d)
    x, s = draw(n, d, offset=1e4)
    y, _ = draw(m, d, seed=1, offset=1e4)
    h = bandwidth_for(x)
    direction = functools.partial(jsvgd.svgd_direction, implementation=implementation)
    expected = oracle(x, s, h, queries=y)
    one_by_one = jax.vmap(lambda q: direction(x, s, h, queries=q[None])[0])
    for phi in (direction(x, s, h, queries=y), one_by_one(y)):
        assert relative_error(phi, expected) <= tolerance(implementation)


def test_as_many_queries_as_particles_in_many_dimensions(monkeypatch):
    """Queries of their own never take the Gram regime, however many there are."""
    x, s = draw(20, 300)
    with pytest.raises(ValueError, match="'interpret' does not take this: d = 300"):
        jsvgd.svgd_direction(x, s, 1.0, queries=x, implementation="interpret")
    monkeypatch.setattr(jsvgd.dispatch, "_compute_capability", lambda: 8.0)
    asked = functools.partial(jsvgd.which_implementation, 20, 300, platform="gpu")
    assert asked().implementation == "triton"
    assert asked(num_queries=20).implementation == asked(num_queries=19).implementation == "xla"


@every_implementation
@every_kernel
@pytest.mark.parametrize("distance", [3.0, 30.0, 300.0, 1e5])
@pytest.mark.parametrize(("n", "d"), [(143, 67), (211, 3), (40, 300)])
def test_far_clusters(implementation, kernel, distance, n, d):
    supported(implementation, n, d, kernel)
    x, s = draw(n, d)
    x = (x + distance * np.where(np.arange(n) % 3 == 0, 1, -1)[:, None]).astype(np.float32)
    h = np.float32(2 * d / np.log(n))
    phi = jsvgd.svgd_direction(x, s, h, kernel=kernel, implementation=implementation)
    assert relative_error(phi, oracle(x, s, h, kernel=kernel)) <= 1e-3


@every_implementation
def test_a_lost_neighbour_does_not_spoil_far_clusters(implementation):
    """NaN in one chain, or in one query, leaves the others their digits."""
    x, s = draw(67, 9)
    x = (x + 300 * np.where(np.arange(67) % 3 == 0, 1, -1)[:, None]).astype(np.float32)
    lost = x.copy()
    lost[0, 0] = np.nan
    h = np.float32(3.0)
    direction = functools.partial(jsvgd.svgd_direction, implementation=implementation)
    chains = jax.vmap(direction, in_axes=(0, None, None))(np.stack([lost, x]), s, h)
    assert relative_error(chains[1], oracle(x, s, h)) <= 1e-5
    assert np.isnan(chains[0]).all()
    phi = direction(x, s, h, queries=lost)
    assert relative_error(phi[1:], oracle(x, s, h)[1:]) <= 1e-5
    assert np.isnan(phi[0]).any()


@every_implementation
@pytest.mark.parametrize(("n", "d"), [(67, 12), (40, 300)])
@pytest.mark.parametrize("distance", [10.0, 40.0])
def test_clusters_below_and_beyond_the_limit_of_products(implementation, n, d, distance):
    """The direction and the update, with clusters that lie apart along one line."""
    supported(implementation, n, d)
    x, s = draw(n, d, scale=0.5 / np.sqrt(d))
    s = s * 0.5 / np.sqrt(d)
    x[: n // 2] += np.float32(distance / np.sqrt(d))
    h = np.float32(1.0)
    options = {"implementation": implementation}
    expected = oracle(x, s, h)
    assert relative_error(jsvgd.svgd_direction(x, s, h, **options), expected) <= 1e-3
    moved = jsvgd.svgd_update(x, s, h, 0.25, **options)
    np.testing.assert_allclose(moved, wide(x) + 0.25 * expected, rtol=1e-6, atol=1e-4)


@every_implementation
def test_far_queries_of_near_particles(implementation):
    x, s = draw(67, 12)
    y, _ = draw(5, 12, seed=1)
    y[0] = np.nan  # must not hide the one that is far
    y[1] += 1e5
    direction = functools.partial(jsvgd.svgd_direction, kernel="imq", implementation=implementation)
    supported(implementation, 67, 12, "imq")
    phi, expected = direction(x, s, 2.0, queries=y), oracle(x, s, 2.0, queries=y, kernel="imq")
    assert relative_error(phi[1:], expected[1:]) <= 1e-3
    assert relative_error(phi[1], expected[1]) <= 1e-3


@every_implementation
@pytest.mark.parametrize("d", [12, 300])
def test_float32_stays_float32_under_x64(implementation, d, x64):
    supported(implementation, 67, d)
    x, s = draw(67, d)
    h = bandwidth_for(x)
    phi = jsvgd.svgd_direction(x, s, h, implementation=implementation)
    assert phi.dtype == jnp.float32
    assert relative_error(phi, oracle(x, s, h)) <= tolerance(implementation)


@every_implementation
def test_one_far_particle_in_one_chain_of_many(implementation):
    x, s = (np.stack(a) for a in zip(*(draw(67, 9, seed=i) for i in range(3)), strict=True))
    x[1, 17] += 1e5
    h = np.float32(3.0)
    direction = functools.partial(jsvgd.svgd_direction, implementation=implementation)
    phi = jax.jit(jax.vmap(direction, in_axes=(0, 0, None)))(x, s, h)
    for chain in range(3):
        assert relative_error(phi[chain], oracle(x[chain], s[chain], h)) <= tolerance(
            implementation
        )


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
    gradient = jax.grad(objective(s, kernel=kernel, implementation=implementation))
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
    got = jax.grad(objective(weights, kernel=kernel, implementation=implementation), (0, 1, 2))
    for value, expected in zip(
        got(x, s, h), oracle_gradients(x, s, h, weights, kernel=kernel), strict=True
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

    def value(function, x, s, h, y):
        return jnp.sum(weights * function(x, s, h, queries=y, kernel=kernel))

    got = jax.grad(functools.partial(value, direction), (0, 1, 2, 3))(x, s, h, y)
    with jax.enable_x64(True):
        dense = functools.partial(value, jsvgd.reference.direction)
        expected = jax.grad(dense, (0, 1, 2, 3))(*map(wide, (x, s, h, y)))
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
def test_gradient_in_repulsion(implementation):
    x, s = draw(97, 13)
    h = bandwidth_for(x)

    def value(function, repulsion):
        return jnp.sum(function(x, s, h, repulsion=repulsion) ** 2)

    direction = functools.partial(jsvgd.svgd_direction, implementation=implementation)
    got = jax.grad(functools.partial(value, direction))(1.3)
    expected = jax.grad(functools.partial(value, jsvgd.reference.direction))(1.3)
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
    for value, right in zip(got(x, s, h), expected, strict=True):
        assert relative_error(value, right) <= 1e-9


@every_implementation
def test_gradients_of_far_clusters(implementation):
    n, d = 143, 7
    x, s = draw(n, d)
    x = (x + 300 * np.where(np.arange(n) % 3 == 0, 1, -1)[:, None]).astype(np.float32)
    weights = draw(n, d, seed=1)[1]
    got = jax.grad(objective(weights, implementation=implementation), (0, 1, 2))
    expected = oracle_gradients(x, s, np.float32(2.0), weights)
    for value, right in zip(got(x, s, np.float32(2.0)), expected, strict=True):
        assert relative_error(value, right) <= 1e-3


@every_implementation
@pytest.mark.parametrize("per_dimension", [False, True])
@pytest.mark.parametrize("with_queries", [False, True])
@pytest.mark.parametrize("distance", [5.0, 15.0, 30.0, 46.0, 100.0])
def test_bandwidth_gradient_of_two_clusters(implementation, per_dimension, with_queries, distance):
    """Its sums cancel long before the direction loses digits."""
    if implementation == "interpret" and with_queries:
        pytest.skip("the gradient with queries of their own is XLA's, whatever makes the direction")
    n, d = 66, 5
    supported(implementation, n, d)
    x, s = draw(n, d)
    x[: n // 2] += np.float32(distance)
    h = np.float32([0.7, 1.0, 1.3, 1.1, 0.9]) if per_dimension else np.float32(1.0)
    weights = draw(n, d, seed=3)[1]

    def value(direction, x, s, h):
        options = {"queries": x} if with_queries else {}
        return jnp.sum(weights * direction(x, s, h, **options))

    direction = functools.partial(jsvgd.svgd_direction, implementation=implementation)
    got = jax.grad(functools.partial(value, direction), 2)(x, s, h)
    with jax.enable_x64(True):
        dense = functools.partial(value, jsvgd.reference.direction)
        expected = jax.grad(dense, 2)(*map(wide, (x, s, h)))
    allowed = 5e-4 if on_matrix_units(implementation) else 1e-4  # the sums cancel
    assert relative_error(got, expected) <= allowed


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
    got = jax.grad(functools.partial(norm_of_gradient, direction), (0, 1, 2))(x, s, 1.7)
    dense = functools.partial(norm_of_gradient, jsvgd.reference.direction)
    for value, expected in zip(got, jax.grad(dense, (0, 1, 2))(x, s, 1.7), strict=True):
        assert relative_error(value, expected) <= 1e-9


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
        jax.grad(functools.partial(norm_of_gradient, way), (0, 1, 2))(x, s, h)
        for way in (implementation, "xla")
    )
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) <= 2e-4


@every_implementation
@every_kernel
def test_transformations_agree(implementation, kernel):
    supported(implementation, 67, 9, kernel)
    chains, n, d = 3, 67, 9
    x, s = (np.stack(a) for a in zip(*(draw(n, d, seed=i) for i in range(chains)), strict=True))
    h = np.float32([1.0, 2.5, 7.0])
    weights = draw(n, d, seed=9)[1]
    options = {"kernel": kernel, "implementation": implementation}
    direction = functools.partial(jsvgd.svgd_direction, **options)
    alone = np.stack([direction(x[i], s[i], h[i]) for i in range(chains)])
    batched = jax.vmap(direction)
    np.testing.assert_allclose(batched(x, s, h), alone, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(batched)(x, s, h), alone, rtol=1e-5, atol=1e-6)
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


@every_implementation
def test_bfloat16_is_computed_in_float32(implementation):
    x, s = (jnp.asarray(a, jnp.bfloat16) for a in draw(97, 13))
    h = jnp.bfloat16(4.0)
    phi = jsvgd.svgd_direction(x, s, h, implementation=implementation)
    assert phi.dtype == jnp.bfloat16
    expected = oracle(*(np.asarray(a, np.float64) for a in (x, s, h)))
    assert relative_error(np.asarray(phi, np.float32), expected) <= 3e-3  # the last rounding alone
    gradients = jax.grad(
        lambda *a: jsvgd.svgd_direction(*a, implementation=implementation).astype(float).sum(),
        (0, 1, 2),
    )(x, s, h)
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
    got = jax.grad(functools.partial(value, update), (0, 1))(x, 0.3)
    expected = jax.grad(functools.partial(value, jsvgd.reference.update), (0, 1))(x, 0.3)
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) <= 1e-4


@every_implementation
def test_the_inputs_stay_as_they_are(implementation):
    x, s = draw(67, 3)
    kept = x.copy(), s.copy()
    jsvgd.svgd_update(x, s, 1.0, 0.3, implementation=implementation)
    np.testing.assert_array_equal(x, kept[0])
    np.testing.assert_array_equal(s, kept[1])


@every_implementation
@pytest.mark.parametrize(("n", "d"), [(131, 3), (131, 17), (67, 300)])
def test_same_bits_in_ten_runs_over_poisoned_memory(implementation, n, d):
    """Nothing is added in an order that changes, and every element is written."""
    supported(implementation, n, d)
    x, s = draw(n, d)
    h = bandwidth_for(x)
    weights = draw(n, d, seed=1)[1]
    options = {"implementation": implementation}
    work = jax.jit(jax.value_and_grad(objective(weights, **options), (0, 1, 2)))
    direction = jax.jit(functools.partial(jsvgd.svgd_direction, **options))
    first = jax.tree.map(np.asarray, (direction(x, s, h), work(x, s, h)))
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(first))
    for _ in range(10):
        # What is freed here is what the next call gets for its results.
        poison = [jnp.full((rows, d), jnp.nan) for rows in (n, n, 2 * n, 8 * n)]
        jax.block_until_ready(poison)
        del poison
        again = direction(x, s, h), work(x, s, h)
        jax.tree.map(np.testing.assert_array_equal, again, first)


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
    got = jax.grad(objective(weights, kernel=student), (0, 1, 2))(x, s, h)
    expected = oracle_gradients(x, s, h, weights, kernel=student)
    for value, right in zip(got, expected, strict=True):
        assert relative_error(value, right) <= 1e-4


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


def test_the_backward_pass_stores_the_inputs_alone():
    n, d = 4096, 3
    x, s = draw(n, d)

    def stored(implementation):
        function = functools.partial(jsvgd.svgd_direction, implementation=implementation)
        _, vjp = jax.vjp(function, x, s, np.float32(1.0))
        return sum(a.size for a in jax.tree.leaves(vjp))

    assert stored(None) <= 2 * n * d + 16
    assert stored("dense") > n * n  # the measure does see an N x N residual


@pytest.mark.parametrize(
    ("implementation", "work"),
    [
        *((None, work) for work in ("direction", "gradient", "queries", "second order")),
        *(("xla", work) for work in ("direction", "gradient", "queries")),
    ],
)
def test_memory_does_not_grow_with_the_square(implementation, work):
    n, d = 6000, 3
    x, s = draw(n, d)

    def value(x, s):
        queries = s if work == "queries" else None
        options = {"queries": queries, "implementation": implementation}
        return jnp.sum(jsvgd.svgd_direction(x, s, 1.0, **options) ** 2)

    gradient = jax.grad(value)
    function = {
        "direction": value,
        "second order": jax.grad(lambda x, s: jnp.sum(gradient(x, s) ** 2)),
    }.get(work, gradient)
    analysis = jax.jit(function).lower(x, s).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < n * n * 4 / 2


@pytest.mark.parametrize("precision", ["highest", "high", "default"])
def test_every_product_states_its_precision(precision):
    x, s = draw(33, 5)
    expected = jax.lax.Precision.DEFAULT if precision == "default" else jax.lax.Precision.HIGHEST

    def value(x):
        return jnp.sum(jsvgd.svgd_direction(x, s, 1.0, precision=precision, implementation="xla"))

    products = list(_equations(jax.make_jaxpr(jax.value_and_grad(value))(x).jaxpr, "dot_general"))
    assert len(products) >= 4
    assert {p.params["precision"] for p in products} == {(expected, expected)}


def _equations(jaxpr, name):
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            yield equation
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from _equations(inner, name)
