"""The Hopper kernels without a GPU: their operands, their choice of tiles, their lowering for CUDA.

That they compute the right numbers is proved on a GPU by ``experiments/check_hopper.py`` and by the
shared suite of the direction, which runs them where there is one.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    hopper_backward,
    hopper_forward,
    hopper_forward_kernel,
    hopper_operands,
    hopper_tiles,
)

needs_mosaic = pytest.mark.skipif(
    not hopper_forward.available()[0], reason=hopper_forward.available()[1] or "available"
)


def shapes(*all_shapes):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in all_shapes]


def lowered(f, *all_shapes):
    """The text of f lowered for an H200, on any machine."""
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "cuda")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(f).trace(*shapes(*all_shapes))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def forward_shapes(n, m, d):
    return (m, d), (n, d), (n, d), (d,)


def backward_shapes(n, d):
    return (n, d), (n, d), (d,), (n, d)


def wgmma_dtypes(f, *all_shapes):
    """Operand dtypes of every wgmma in f's jaxpr, in order."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "wgmma_ref":
                found.append(tuple(v.aval.dtype.name for v in eqn.invars[1:3]))
            for inner in jax.tree.leaves(
                list(eqn.params.values()),
                is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(f)(*shapes(*all_shapes)).jaxpr)
    return found


# d: both packed lanes, every split lane, one to four chunks; n and m ragged; few and many blocks.
FORWARD = [
    (777, 1000, 2),
    (4096, 4096, 4),
    (1000, 777, 9),
    (999, 999, 13),
    (1024, 1024, 32),
    (16384, 16384, 64),
    (2500, 64, 100),
    (16384, 16384, 128),
    (5000, 5000, 190),
    (16384, 16384, 256),
]
BACKWARD = [(777, 4), (1000, 16), (1024, 32), (16384, 64), (2500, 100), (16384, 128)]


def test_runs_of_steps_need_one_warpgroup():
    with pytest.raises(ValueError, match="run=8 needs one warpgroup, got 2"):
        hopper_tiles.ForwardTiles(warpgroups=2, run=8)


@needs_mosaic
@pytest.mark.parametrize("precision", ["high", "default"])
@pytest.mark.parametrize("n, m, d", FORWARD)
def test_forward_lowers_and_is_named(n, m, d, precision):
    assert hopper_forward.supports("rbf", n, m, d, precision, jnp.float32) == (True, "")
    f = functools.partial(hopper_forward.forward, precision=precision)
    assert hopper_forward_kernel.NAME in lowered(f, *forward_shapes(n, m, d))


@needs_mosaic
@pytest.mark.parametrize("precision", ["high", "default"])
@pytest.mark.parametrize("n, d", BACKWARD)
def test_backward_lowers_and_is_named(n, d, precision):
    assert hopper_backward.supports("rbf", n, n, d, precision, jnp.float32) == (True, "")
    f = functools.partial(hopper_backward.backward, precision=precision)
    assert hopper_backward.NAME in lowered(f, *backward_shapes(n, d))


@needs_mosaic
def test_nested_vmap_is_one_launch():
    f = jax.vmap(jax.vmap(hopper_forward.forward, in_axes=(0, 0, 0, None)))
    text = lowered(f, (2, 3, 100, 5), (2, 3, 130, 5), (2, 3, 130, 5), (2, 5))
    assert text.count("custom_call @mosaic_gpu") == 1
    b = jax.vmap(hopper_backward.backward)
    assert hopper_backward.NAME in lowered(b, *[(4, *shape) for shape in backward_shapes(100, 5)])


@needs_mosaic
def test_precision_decides_the_products():
    """Three products each way at "high", the exponent's in float16, the sum's in bfloat16; else one."""
    n, d = 256, 64
    high = wgmma_dtypes(hopper_forward.forward, *forward_shapes(n, n, d))
    assert sorted(high) == [("bfloat16",) * 2] * 3 + [("float16",) * 2] * 3
    f = functools.partial(hopper_forward.forward, precision="default")
    assert sorted(wgmma_dtypes(f, *forward_shapes(n, n, d))) == [
        ("bfloat16",) * 2,
        ("float16",) * 2,
    ]
    packed = wgmma_dtypes(hopper_forward.forward, *forward_shapes(n, n, 4))
    assert sorted(packed) == [("bfloat16",) * 2] * 2 + [("float16",) * 2]
    back = wgmma_dtypes(hopper_backward.backward, *backward_shapes(n, d))
    assert back == [("bfloat16",) * 2] * 15
    back = wgmma_dtypes(hopper_backward.backward, *backward_shapes(n, 32))
    assert sorted(back) == [("bfloat16",) * 2] * 12 + [("float16",) * 2] * 3


@pytest.mark.parametrize("n, m, d", FORWARD)
@pytest.mark.parametrize("precision", ["high", "default"])
def test_chosen_tiles_fit_and_cover(n, m, d, precision):
    layout, tiles = hopper_tiles.forward_tiles(n, m, d, precision)
    assert hopper_tiles.fits(layout, tiles) == (True, "")
    assert layout.packed or layout.chunks * layout.lane >= d
    assert tiles.splits <= -(-n // tiles.block_k)


@pytest.mark.parametrize(
    "change, word",
    [
        ({"kernel": "imq"}, "kernel"),
        ({"precision": "highest"}, "precision"),
        ({"dtype": jnp.float64}, "dtype"),
        ({"d": 257}, "d must be"),
        ({"n": 5}, "particles"),
    ],
)
@needs_mosaic
def test_supports_says_why_not(change, word):
    arguments = {
        "kernel": "rbf",
        "n": 1000,
        "m": 1000,
        "d": 64,
        "precision": "high",
        "dtype": jnp.float32,
    }
    ok, reason = hopper_forward.supports(**(arguments | change))
    assert not ok
    assert word in reason
    change = {"n": 1000} | change
    ok, reason = hopper_backward.supports(**(arguments | change | {"m": change["n"]}))
    assert not ok
    assert word in reason


@needs_mosaic
def test_backward_refuses_what_shared_memory_cannot_hold():
    ok, reason = hopper_backward.supports("rbf", 1000, 1000, 256, "high", jnp.float32)
    assert not ok
    assert "shared memory" in reason
    x = jnp.zeros((1000, 256))
    with pytest.raises(ValueError, match="shared memory"):
        hopper_backward.backward(x, x, x[0], x)


def test_supports_refuses_older_jax():
    if hopper_forward.available()[0]:
        pytest.skip("this JAX has the Mosaic GPU features")
    ok, reason = hopper_forward.supports("rbf", 1000, 1000, 64, "high", jnp.float32)
    assert not ok
    assert "JAX >= 0.11" in reason


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype, bits", [(jnp.float16, 20), (jnp.bfloat16, 16)])
def test_pieces_keep_the_low_half_under_jit(dtype, bits):
    """Were the rounding removed as excess precision, the low half would be zero: 8 or 11 bits left."""
    x = 1 + np.abs(random(0, 1000))
    hi, lo = jax.jit(lambda x: hopper_operands.split_pair(x, dtype))(x)
    assert np.max(np.abs(np.float64(hi) + np.float64(lo) - x) / x) < 2.0**-bits
    packed = jax.jit(lambda x: hopper_operands.pack_pair(x, 16, 2, 2, dtype))(x.reshape(50, 20))
    packed = np.float64(packed).reshape(50, 2, 2, 16)
    np.testing.assert_array_equal(packed[:, :, 0].reshape(50, 32)[:, :20].ravel(), np.float64(hi))
    np.testing.assert_array_equal(packed[:, :, 1].reshape(50, 32)[:, :20].ravel(), np.float64(lo))


def test_cut_bits_halve_as_conversions_do():
    """Integer halving keeps 16 bits of any sign and size, and exact zeros."""
    t = random(3, 4000) * np.exp2(np.random.default_rng(4).uniform(-60, 20, 4000))
    t = np.concatenate([t, [0.0, -0.0, 1.0]]).astype(np.float32)
    hi, lo = hopper_operands.halves(jnp.asarray(t), True)
    error = np.abs(np.float64(hi) + np.float64(lo) - t)
    assert (error <= 2.0**-17 * np.abs(t)).all()
    slow = hopper_operands.halves(jnp.asarray(t), False)
    np.testing.assert_allclose(np.float64(slow[0]), np.float64(hi), rtol=2.0**-7)


@pytest.mark.parametrize("n, d", [(50, 1), (70, 4), (33, 9), (90, 13), (64, 64), (77, 130)])
def test_operands_make_the_direction(n, d):
    """The kernel's arithmetic done in float64 on its own operands is the direction, padding included."""
    z, s = random(1, n, d), random(2, n, d)
    layout, _tiles = hopper_tiles.forward_tiles(n, n, d, "high")
    rows = 256
    y = jnp.asarray(z * hopper_operands.LOG2E_ROOT)
    (q, aq), (k, ak) = (
        [np.asarray(t, np.float64) for t in hopper_operands.exponent_operand(y, layout, rows, role)]
        for role in ("queries", "keys")
    )
    v = np.asarray(hopper_operands.value_operand(jnp.asarray(s), layout, rows), np.float64)

    def whole(t, lane):
        if layout.packed:
            return t
        return t.reshape(rows, layout.chunks, layout.pieces, lane).sum(2).reshape(rows, -1)

    e = whole(q, layout.lane) @ whole(k, layout.lane).T
    if not layout.packed:
        e = e - aq[:, None] - ak
    weights = np.exp2(e)
    assert (weights[:n, n:] == 0).all()
    total = weights @ whole(v, layout.value_lane)
    if layout.packed:
        np.testing.assert_allclose(total[:n, 0], weights[:n].sum(1), rtol=1e-12)
        total = total[:, 1 : 3 * d + 1].reshape(rows, 3, d).sum(1)
    diff = np.float64(z)[:, None] - np.float64(z)[None]
    exact = np.exp(-0.5 * (diff**2).sum(-1)) @ np.float64(s)
    np.testing.assert_allclose(total[:n, :d], exact, rtol=2e-5, atol=2e-5)
