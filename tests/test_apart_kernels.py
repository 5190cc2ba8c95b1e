"""Kernels behind the flag for particles far apart, and the kernel for few particles, one at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import triton_apart, triton_gram, triton_small, triton_tiles
from tests.problems import relative_error, wide

ON_GPU = jax.default_backend() == "gpu"
options = {"interpret": not ON_GPU}
every_kernel = pytest.mark.parametrize("kernel", ["rbf", "imq"])


def problem(n, d, m=None, offset=0.0):
    rng = np.random.default_rng([n, d, 5])
    x = rng.normal(size=(n, d))
    x[: n // 2] += offset
    q = x if m is None else rng.normal(size=(m, d))
    scale = rng.uniform(0.5, 1, d) / np.sqrt(d / 3)
    s, g = rng.normal(size=(2, n, d))
    return [a.astype(np.float32) for a in (q, x, s, scale, 0.7 * scale, g)]


def weights(kernel, u):
    return (np.exp(-u),) * 2 if kernel == "rbf" else ((1 + 2 * u) ** -0.5, (1 + 2 * u) ** -1.5)


def dense(kernel, q, x, s, scale, c):
    q, x, s, scale, c = map(wide, (q, x, s, scale, c))
    difference = scale * (q[:, None] - x[None])
    f, w = weights(kernel, 0.5 * np.sum(difference**2, axis=-1))
    return (f @ s + np.sum(w[..., None] * c * difference, axis=1)) / len(x)


@every_kernel
@pytest.mark.parametrize(("n", "m", "d"), [(37, 21, 11), (1, 1, 3), (43, 5, 130)])
def test_forward_takes_differences_where_the_flag_says_so(kernel, n, m, d):
    q, x, s, scale, c, _ = problem(n, d, m, offset=1e4)
    near = np.full((m, d), 7.0, np.float32)
    forward = jax.jit(functools.partial(triton_apart.forward, kernel=kernel, **options))
    np.testing.assert_array_equal(forward(near, False, q, x, s, scale, c), near)
    assert (
        relative_error(forward(near, True, q, x, s, scale, c), dense(kernel, q, x, s, scale, c))
        < 2e-6
    )
    several = forward(near, np.int32([0, 0, 1]), q, x, s, scale, c)  # one flag of many suffices
    np.testing.assert_array_equal(several, forward(near, True, q, x, s, scale, c))
    moved = triton_apart.forward(
        near, True, q, x, s, scale, c, kernel=kernel, base=q, step=np.float32(0.3), **options
    )
    assert (
        relative_error(moved, wide(q) + np.float32(0.3) * dense(kernel, q, x, s, scale, c)) < 2e-6
    )


@pytest.mark.parametrize(("parts", "m", "d"), [(1, 21, 11), (5, 37, 3), (16, 70, 130)])
def test_parts_are_added_where_the_flag_is_not_set(parts, m, d):
    q, x, s, scale, c, _ = problem(43, d, m, offset=1e4)
    near = np.random.default_rng(0).normal(size=(parts, m, d)).astype(np.float32)
    assemble = functools.partial(triton_apart.assemble, kernel="rbf", **options)
    base = {"base": q, "step": np.float32(0.3)}
    phi = dense("rbf", q, x, s, scale, c)
    for far, expected in ((np.int32([0, 0]), wide(near).sum(axis=0)), (np.int32([0, 1]), phi)):
        given = near, far, q, x, s, scale, c
        assert relative_error(assemble(*given), expected) < 2e-6
        moved = wide(q) + np.float32(0.3) * expected
        assert relative_error(assemble(*given, **base), moved) < 2e-6
    # Under vmap each problem has its own flags.
    both = jax.vmap(assemble, (0, 0, *[None] * 5))(
        np.stack([near, near]), np.int32([[0, 0], [0, 1]]), q, x, s, scale, c
    )
    assert relative_error(both[0], wide(near).sum(axis=0)) < 2e-6
    assert relative_error(both[1], phi) < 2e-6


@every_kernel
@pytest.mark.parametrize(("n", "d"), [(37, 11), (1, 3), (29, 70)])
def test_backward_takes_differences_where_the_flag_says_so(kernel, n, d):
    _, x, s, scale, c, g = problem(n, d, offset=1e3)
    near = [np.full((n, d), float(k), np.float32) for k in range(4)]
    backward = jax.jit(functools.partial(triton_apart.backward, kernel=kernel, **options))
    for a, b in zip(backward(near, False, x, s, scale, c, g), near, strict=True):
        np.testing.assert_array_equal(a, b)
    dz, ds, dc, dl = (wide(a) for a in backward(near, True, x, s, scale, c, g))
    with jax.enable_x64(True):

        def value(log_scale, s, c, x):
            difference = jnp.exp(log_scale) * (x[:, None] - x[None])
            u = 0.5 * jnp.sum(difference**2, axis=-1)
            f = jnp.exp(-u) if kernel == "rbf" else (1 + 2 * u) ** -0.5
            w = jnp.exp(-u) if kernel == "rbf" else (1 + 2 * u) ** -1.5
            return jnp.sum(wide(g) * (f @ s + jnp.sum(w[..., None] * c * difference, 1))) / n

        exact = jax.grad(value, (0, 1, 2, 3))(np.log(wide(scale)), *map(wide, (s, c, x)))
    got = dl.sum(axis=0), ds, dc.sum(axis=0), dz * wide(scale)
    for a, b in zip(got, exact, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * max(1.0, np.abs(b).max()))


@every_kernel
def test_few_particles_in_many_dimensions_take_differences(kernel):
    n, d = 21, 301
    _, x, s, scale, c, _ = problem(n, d, offset=1e3)
    difference = wide(scale) * (wide(x)[:, None] - wide(x)[None])
    u = 0.5 * np.sum(difference**2, axis=-1)
    distances = functools.partial(triton_apart.half_squared_distances, **options)
    got = distances(jnp.zeros((n, n)), True, x, scale)
    np.testing.assert_allclose(got, u, rtol=1e-6, atol=1e-6)
    f, w = (a.astype(np.float32) for a in weights(kernel, u))
    combine = jax.vmap(functools.partial(triton_apart.combine, **options), (0, 0, *[None] * 6))
    near = jnp.full((2, n, d), 7.0)
    phi = combine(near, jnp.array([True, False]), f, w, x, s, scale, c)
    assert relative_error(phi[0], dense(kernel, x, x, s, scale, c)) < 2e-6
    np.testing.assert_array_equal(phi[1], near[1])


@every_kernel
@pytest.mark.parametrize(
    ("precision", "limit"), [("high", 1e-5), ("default", 1e-2), ("highest", 2e-6)]
)
@pytest.mark.parametrize(
    ("n", "m", "d"), [(37, 21, 11), (1, 1, 9), (300, None, 50), (131, 77, 129)]
)
def test_few_particles_from_raw_arrays(kernel, precision, limit, n, m, d):
    q, x, s, scale, c, _ = problem(n, d, m)
    q, x = q + np.float32(100), x + np.float32(100)
    forward = jax.jit(
        functools.partial(
            triton_small.forward, kernel=kernel, precision=precision, limit=1000.0, **options
        )
    )
    assert relative_error(forward(q, x, s, scale, c), dense(kernel, q, x, s, scale, c)) < limit
    assert not flags(kernel, precision, q, x, s, scale, c).any()
    outlier = x.copy()
    outlier[n // 2] += 1e4  # seen wherever it stands, unless it is its own centre
    assert flags(kernel, precision, q, outlier, s, scale, c).any() or n == 1
    # Pairs of a far cluster: products have no digits of theirs left.
    x[n // 2 :] += 1e4
    q = x if m is None else q
    assert relative_error(forward(q, x, s, scale, c), dense(kernel, q, x, s, scale, c)) < 2e-6


def flags(kernel, precision, *arrays):
    """What programs say of particles beyond the limit."""
    choice = (kernel, precision, 1000.0, not ON_GPU, None)
    return triton_small._parts(choice, *(jnp.asarray(a)[None] for a in arrays))[1]


def test_few_particles_in_as_many_chains_as_change_the_tiles():
    """How many parts a direction is made of depends on how many chains there are."""
    n, d, chains = 70, 12, 64
    assert (
        triton_tiles.small_tiles(n, n, d, "high").splits
        > triton_tiles.small_tiles(n, n, d, "high", chains).splits
    )
    _, x, s, scale, c, _ = problem(n, d)
    x = x + 0.01 * np.arange(chains, dtype=np.float32)[:, None, None] * s
    forward = functools.partial(
        triton_small.forward, kernel="rbf", precision="high", limit=1000.0, **options
    )
    phi = jax.jit(jax.vmap(forward, (0, 0, None, None, None)))(x, x, s, scale, c)
    moved = jax.jit(
        jax.vmap(
            lambda x: forward(x, x, s, scale, c, base=x, step=np.float32(0.3)),
        )
    )(x)
    for k in (0, 1, chains - 1):
        exact = dense("rbf", x[k], x[k], s, scale, c)
        assert relative_error(phi[k], exact) < 1e-5
        assert relative_error(moved[k], wide(x[k]) + np.float32(0.3) * exact) < 1e-5


@every_kernel
@pytest.mark.parametrize(("n", "d"), [(37, 301), (300, 333)])
@pytest.mark.parametrize(
    ("precision", "limit"), [("high", 2e-5), ("default", 1e-2), ("highest", 2e-6)]
)
def test_gram_and_combine(kernel, n, d, precision, limit):
    """Operands split on the way, and from some hundreds of particles on outside."""
    _, x, s, scale, c, _ = problem(n, d)
    gram = triton_gram.gram(x, x[0], scale, precision=precision, **options)
    z = wide(scale) * (wide(x) - wide(x[0]))
    assert relative_error(gram, z @ z.T) < limit
    f, w = weights(kernel, 0.5 * np.sum((z[:, None] - z[None]) ** 2, axis=-1))
    phi = triton_gram.combine(
        *(a.astype(np.float32) for a in (f, w)),
        x, s, x[0], scale, c, kernel=kernel, precision=precision, **options,
    )  # fmt: skip
    assert relative_error(phi, dense(kernel, x, x, s, scale, c)) < limit
