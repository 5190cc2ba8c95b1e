"""The portable Pallas kernels themselves, under the interpreter, against the dense formula in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import triton_backward, triton_forward, triton_tiles

# ||out - ref|| / ||ref|| that each precision may reach at these sizes
LIMITS = {"highest": 4e-6, "high": 4e-5, "default": 1e-2}


def weights(kernel, distance):
    """f, w = -f' and f'' at u = distance / 2."""
    if kernel == "rbf":
        f = np.exp(-distance / 2)
        return f, f, f
    t = 1 + distance
    return t**-0.5, t**-1.5, 3 * t**-2.5


def dense_forward(zq, zk, s, c, kernel):
    zq, zk, s, c = (np.asarray(x, np.float64) for x in (zq, zk, s, c))
    difference = zq[:, None] - zk[None]
    f, w, _ = weights(kernel, (difference**2).sum(-1))
    return (f @ s + c * (w[..., None] * difference).sum(1)) / len(zk)


def dense_backward(z, s, c, g, kernel):
    """Each cotangent from the derivative of the sum over pairs, written out without its symmetries."""
    z, s, c, g = (np.asarray(x, np.float64) for x in (z, s, c, g))
    difference = z[:, None] - z[None]
    f, w, curvature = weights(kernel, (difference**2).sum(-1))
    gn = g / len(z)
    # phi_i depends on u_ij through f (slope -w) and w (slope -f''), and on z_i - z_j itself
    slope = -w * (gn @ s.T) - curvature * np.einsum("ic,c,ijc->ij", gn, c, difference)
    pair = slope[..., None] * difference + w[..., None] * (c * gn)[:, None]
    dc = np.einsum("ic,ij,ijc->c", gn, w, difference)
    return pair.sum(1) - pair.sum(0), f.T @ gn, dc


def problem(n, d, seed=0, m=None, batch=()):
    """Particles scaled as the median rule would, scores near -x, any cotangent; all float32."""
    rng = np.random.default_rng(seed)
    scale = np.sqrt(np.log(n + 2) / (2 * d))
    zk = rng.standard_normal((*batch, n, d)) * scale
    zq = zk if m is None else rng.standard_normal((*batch, m, d)) * scale
    s = -zk / scale + 0.1 * rng.standard_normal(zk.shape)
    g = rng.standard_normal(zk.shape)
    c = scale * rng.uniform(0.5, 1.5, d)
    return tuple(jnp.asarray(x, jnp.float32) for x in (zq, zk, s, c, g))


def error(out, ref):
    assert out.dtype == jnp.float32
    assert np.isfinite(out).all()  # under the interpreter an element never written is NaN
    return np.linalg.norm(np.asarray(out, np.float64) - ref) / np.linalg.norm(ref)


@functools.partial(jax.jit, static_argnames=("kernel", "precision", "family", "choice"))
def forward(*args, **options):
    return triton_forward.forward(*args, interpret=True, **options)


@functools.partial(jax.jit, static_argnames=("kernel", "precision", "family", "choice"))
def backward(*args, **options):
    dz, ds, rows = triton_backward.backward(*args, interpret=True, **options)
    return dz, ds, jnp.sum(args[0] * rows, axis=0)


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
@pytest.mark.parametrize(
    ("family", "n", "m", "d", "precision"),
    [
        ("direct", 130, 37, 1, "high"),
        ("direct", 97, 97, 3, "high"),
        ("dot", 97, 45, 3, "high"),
        ("dot", 130, 131, 20, "highest"),
        ("dot", 130, 131, 20, "high"),
        ("dot", 130, 131, 20, "default"),
        ("dot", 33, 64, 65, "high"),
        ("direct", 1, 1, 2, "high"),
        ("dot", 1, 3, 2, "high"),
    ],
)
def test_forward_of_ragged_sizes(kernel, family, n, m, d, precision):
    zq, zk, s, c, _ = problem(n, d, m=m)
    out = forward(zq, zk, s, c, kernel=kernel, precision=precision, family=family)
    assert out.shape == (m, d)
    limit = 2e-6 if family == "direct" else LIMITS[precision]
    assert error(out, dense_forward(zq, zk, s, c, kernel)) < limit


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
@pytest.mark.parametrize(
    ("family", "n", "d", "precision"),
    [
        ("direct", 97, 1, "high"),
        ("direct", 70, 3, "high"),
        ("dot", 70, 3, "high"),
        ("dot", 97, 20, "highest"),
        ("dot", 97, 20, "high"),
        ("dot", 97, 20, "default"),
        ("direct", 2, 2, "high"),
    ],
)
def test_backward_of_ragged_sizes(kernel, family, n, d, precision):
    _, z, s, c, g = problem(n, d, seed=1)
    out = backward(z, s, c, g, kernel=kernel, precision=precision, family=family)
    for name, x, ref in zip(
        ("dz", "ds", "dc"), out, dense_backward(z, s, c, g, kernel), strict=True
    ):
        limit = 4e-6 if family == "direct" else 2 * LIMITS[precision]
        assert x.shape == ref.shape, name
        assert error(x, ref) < limit, name


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
def test_dense_backward_is_the_derivative_of_dense_forward(kernel):
    """The oracle itself, by central differences in float64."""
    _, *arrays = (np.asarray(x, np.float64) for x in problem(6, 2, seed=2))
    z, s, c, g = arrays
    grads = dense_backward(z, s, c, g, kernel)

    def value(z, s, c):
        return (dense_forward(z, z, s, c, kernel) * g).sum()

    for which, grad in enumerate(grads):
        for at in np.ndindex(grad.shape):
            up, down = ([x.copy() for x in (z, s, c)] for _ in range(2))
            up[which][at] += 1e-5
            down[which][at] -= 1e-5
            assert abs((value(*up) - value(*down)) / 2e-5 - grad[at]) < 1e-8


@pytest.mark.parametrize("family", ["direct", "dot"])
def test_splits_of_the_columns_add_up(family):
    """Columns shared out among programs, the last split all padding, and the update after the sum."""
    zq, zk, s, c, g = problem(70, 2, seed=3)
    bn = 32 if family == "direct" else 16
    choice = triton_tiles.Tiles(family, 32, bn, 4, 1, 4)
    options = {"kernel": "rbf", "precision": "high", "choice": choice}
    ref = dense_forward(zq, zk, s, c, "rbf")
    assert error(forward(zq, zk, s, c, **options), ref) < LIMITS["high"]
    moved = forward(zq, zk, s, c, base=g, scale=jnp.float32(0.3), **options)
    assert error(moved, np.asarray(g, np.float64) + np.float32(0.3) * ref) < LIMITS["high"]
    out = backward(zk, s, c, g, **options)
    for x, y in zip(out, dense_backward(zk, s, c, g, "rbf"), strict=True):
        assert error(x, y) < 2 * LIMITS["high"]


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
@pytest.mark.parametrize("family", ["direct", "dot"])
def test_update_in_the_epilogue(kernel, family):
    zq, zk, s, c, _ = problem(40, 3, seed=4, m=21)
    out = forward(
        zq,
        zk,
        s,
        c,
        base=zq,
        scale=jnp.float32(0.7),
        kernel=kernel,
        precision="high",
        family=family,
    )
    ref = np.asarray(zq, np.float64) + np.float32(0.7) * dense_forward(zq, zk, s, c, kernel)
    assert error(out, ref) < 1e-5


def test_vmap_with_any_operand_shared():
    zq, zk, s, c, g = problem(20, 2, seed=5, m=11, batch=(2,))
    choice = triton_tiles.Tiles("direct", 8, 32, 2, 1, 1)
    options = {"kernel": "rbf", "precision": "high", "choice": choice}
    scale = jnp.asarray([0.1, 0.2], jnp.float32)

    def moved(zq, zk, s, c, scale):
        return forward(zq, zk, s, c, base=zq, scale=scale, **options)

    for axes in [(0, 0, 0, None, None), (0, None, None, None, 0)]:
        args = [
            x if axis == 0 or x is c else x[0]
            for x, axis in zip((zq, zk, s, c, scale), axes, strict=True)
        ]
        out = jax.vmap(moved, in_axes=axes)(*args)
        for b in range(2):
            one = [x if a is None else x[b] for x, a in zip(args, axes, strict=True)]
            ref = np.asarray(one[0], np.float64) + float(one[4]) * dense_forward(*one[:4], "rbf")
            assert error(out[b], ref) < 1e-5
    out = jax.vmap(functools.partial(backward, **options), in_axes=(0, None, None, 0))(
        zk, s[0], c, g
    )
    for b in range(2):
        for x, y in zip(out, dense_backward(zk[b], s[0], c, g[b], "rbf"), strict=True):
            assert error(x[b], y) < 4e-6


def test_vmap_of_the_dot_family():
    _, zk, s, c, g = problem(20, 3, seed=8, batch=(2,))
    options = {"kernel": "rbf", "precision": "high", "family": "dot"}
    out = jax.vmap(functools.partial(forward, **options), in_axes=(None, 0, 0, None))(
        zk[0], zk, s, c
    )
    assert error(out[1], dense_forward(zk[0], zk[1], s[1], c, "rbf")) < LIMITS["high"]
    out = jax.vmap(functools.partial(backward, **options), in_axes=(0, 0, None, 0))(zk, s, c, g)
    for x, y in zip(out, dense_backward(zk[1], s[1], c, g[1], "rbf"), strict=True):
        assert error(x[1], y) < 2 * LIMITS["high"]


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
def test_direct_is_exact_far_from_the_centre(kernel):
    """Two clusters 2000 sqrt(h) apart: expanded squares would have no digits left."""
    _, z, s, c, g = problem(80, 2, seed=6)
    z = z + jnp.where(jnp.arange(80)[:, None] < 40, -1000.0, 1000.0)
    options = {
        "kernel": kernel,
        "precision": "high",
        "choice": triton_tiles.Tiles("direct", 16, 32, 4, 1, 1),
    }
    assert error(forward(z, z, s, c, **options), dense_forward(z, z, s, c, kernel)) < 2e-6
    dz, ds, _ = backward(z, s, c, g, **options)
    refs = dense_backward(z, s, c, g, kernel)
    assert error(dz, refs[0]) < 4e-6
    assert error(ds, refs[1]) < 4e-6


def test_near_and_far_tiles_in_one_call():
    """Rows on both sides of the bound between expanded squares and differences, every row right."""
    z = jnp.linspace(-14.0, 14.0, 128, dtype=jnp.float32)[:, None]
    scaled = np.asarray(z[:, 0]) ** 2 * (np.log2(np.e) / 2)
    assert scaled.max() > triton_forward.NEAR > np.sort(scaled)[:40].max()
    s, c = -z, jnp.ones((1,), jnp.float32)
    choice = triton_tiles.Tiles("direct", 16, 32, 4, 1, 1)
    out = forward(z, z, s, c, kernel="rbf", precision="high", choice=choice)
    ref = dense_forward(z, z, s, c, "rbf")
    assert np.max(np.abs(np.asarray(out) - ref) / np.abs(ref)) < 5e-5


@pytest.mark.parametrize("family", ["direct", "dot"])
def test_coincident_particles_do_not_repel(family):
    z = jnp.full((33, 3), 0.7, jnp.float32)
    s, c = jnp.zeros((33, 3), jnp.float32), jnp.ones((3,), jnp.float32)
    out = forward(z, z, s, c, kernel="rbf", precision="high", family=family)
    assert np.abs(np.asarray(out)).max() < 1e-5


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
@pytest.mark.parametrize("family", ["direct", "dot"])
def test_values_beside_the_operands_do_not_leak(kernel, family):
    """Operands cut from arrays whose next rows and columns are NaN give the same answer to the bit."""
    zq, zk, s, c, g = problem(45, 2, seed=7)

    def cut(x):
        big = jnp.full(tuple(k + 5 for k in x.shape), jnp.nan, jnp.float32)
        return big.at[tuple(slice(0, k) for k in x.shape)].set(x)[
            tuple(slice(0, k) for k in x.shape)
        ]

    options = {
        "kernel": kernel,
        "precision": "high",
        "choice": triton_tiles.Tiles(family, 16, 32, 4, 1, 1),
    }
    plain = forward(zq, zk, s, c, **options), *backward(zk, s, c, g, **options)
    poisoned = (
        forward(*map(cut, (zq, zk, s, c)), **options),
        *backward(*map(cut, (zk, s, c, g)), **options),
    )
    for x, y in zip(plain, poisoned, strict=True):
        assert np.array_equal(x, y)


def test_refusals_name_the_argument():
    zq, zk, s, c, _ = problem(8, 2)
    for supports in (triton_forward.supports, triton_backward.supports):
        assert supports("rbf", 8, 8, 2, "high", jnp.float32) == (True, "")
        for case, word in [
            (("linear", 8, 8, 2, "high", jnp.float32), "kernel"),
            (("rbf", 8, 8, 2, "tf32", jnp.float32), "precision"),
            (("rbf", 8, 8, 2, "high", jnp.float64), "float64"),
            (("rbf", 8, 8, 1000, "high", jnp.float32), "d = 1000"),
        ]:
            covered, reason = supports(*case)
            assert not covered
            assert word in reason
    assert not triton_backward.supports("rbf", 8, 9, 2, "high", jnp.float32)[0]
    with pytest.raises(ValueError, match="got 'linear'"):
        triton_forward.forward(zq, zk, s, c, kernel="linear", precision="high", interpret=True)
    with pytest.raises(ValueError, match="base and scale"):
        triton_forward.forward(
            zq, zk, s, c, kernel="rbf", precision="high", base=zq, interpret=True
        )
    wide = jnp.zeros((8, 17), jnp.float32)
    with pytest.raises(ValueError, match="d <= 16"):
        triton_backward.backward(
            wide,
            wide,
            wide[0],
            wide,
            kernel="rbf",
            precision="high",
            family="direct",
            interpret=True,
        )
