"""Particles and queries far from the origin and from each other, in every implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsvgd
from tests.implementations import (
    COMPILED,
    every_implementation,
    every_kernel,
    supported,
    tolerance,
)
from tests.problems import (
    bandwidth_for,
    draw,
    oracle,
    relative_error,
    wide,
)


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
@pytest.mark.parametrize(("n", "d"), [(143, 67), (211, 3), (40, 300)])
def test_far_clusters(implementation, kernel, n, d):
    supported(implementation, n, d, kernel)
    start, s = draw(n, d)
    h = np.float32(2 * d / np.log(n))
    for distance in (3.0, 30.0, 300.0, 1e5):
        apart = distance * np.where(np.arange(n) % 3 == 0, 1, -1)[:, None]
        x = (start + apart).astype(np.float32)
        phi = jsvgd.svgd_direction(x, s, h, kernel=kernel, implementation=implementation)
        assert relative_error(phi, oracle(x, s, h, kernel=kernel)) <= 1e-3, distance


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
