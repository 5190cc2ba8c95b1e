"""The bodies of the Hopper kernels, run in NumPy on any machine, against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper_backward, hopper_forward, hopper_forward_kernel, hopper_tiles
from tests.hopper_emulation import emulate


def problem(n, m, d):
    """Particles standardised as the median rule would, so that neighbours count."""
    rng = np.random.default_rng([n, m, d])
    scale = np.sqrt(np.log(n) / (2 * d))
    z = (scale * rng.standard_normal((n, d))).astype(np.float32)
    q = (scale * rng.standard_normal((m, d))).astype(np.float32)
    s, g = rng.standard_normal((2, n, d)).astype(np.float32)
    c = rng.uniform(0.5, 1.5, d).astype(np.float32)
    return q, z, s, c, g


def direction(q, z, s, c):
    diff = q[:, None] - z[None]
    k = np.exp(-0.5 * (diff**2).sum(-1))
    return (k @ s + c * np.einsum("ij,ijd->id", k, diff)) / len(z)


def cotangents(z, s, c, g):
    """float64, entry by entry: d/dz, d/ds and d/dc of sum(g * direction(z, z, s, c))."""
    z, s, c, g = (np.asarray(t, np.float64) for t in (z, s, c, g))
    diff = z[:, None] - z[None]
    k = np.exp(-0.5 * (diff**2).sum(-1)) / len(z)
    a = k * (g @ s.T + np.einsum("id,d,ijd->ij", g, c, diff))
    dz = -np.einsum("ij,ijd->id", a + a.T, diff) + c * (k.sum(1)[:, None] * g - k @ g)
    return dz, k @ g, np.einsum("ij,id,ijd->d", k, g, diff)


def relative(out, ref):
    return np.linalg.norm(np.asarray(out, np.float64) - ref) / np.linalg.norm(ref)


@pytest.mark.parametrize(
    "n, m, d, changes",
    [
        (150, 150, 4, {}),
        (150, 70, 4, {"warpgroups": 3, "splits": 2}),
        (150, 150, 9, {"cut_bits": False}),
        (100, 100, 13, {}),
        (200, 130, 40, {"warpgroups": 2, "block_k": 128, "splits": 2, "cut_bits": True}),
        (200, 200, 64, {}),
        (150, 150, 128, {}),
        (200, 70, 130, {"splits": 1, "run": 3}),  # with steps after the last run
        (70, 70, 256, {"splits": 1, "run": 2}),
        (70, 70, 250, {"splits": 1}),
    ],
)
@pytest.mark.parametrize("precision, limit", [("high", 2e-5), ("default", 1e-2)])
def test_forward_body(monkeypatch, n, m, d, changes, precision, limit):
    emulate(monkeypatch, hopper_forward_kernel)
    q, z, s, c, _ = problem(n, m, d)
    z = jnp.asarray(z)[None]
    q = z if m == n else jnp.asarray(q)[None]
    layout, tiles = hopper_tiles.forward_tiles(n, m, d, precision)
    plan = layout, dataclasses.replace(tiles, **changes)
    out = hopper_forward._batched(
        q, z, jnp.asarray(s)[None], jnp.asarray(c)[None], precision=precision, plan=plan
    )
    assert out.shape == (1, m, d)
    ref = direction(*(np.asarray(t, np.float64) for t in (q[0], z[0], s, c)))
    assert relative(out[0], ref) < limit
    if precision == "default":
        assert relative(out[0], ref) > 1e-5  # one product each, as asked


def test_forward_body_of_a_stack(monkeypatch):
    emulate(monkeypatch, hopper_forward_kernel)
    one = problem(70, 70, 5)
    q, z, s, c, _ = (jnp.stack([t, 0.9 * t, -1.1 * t]) for t in one)
    out = hopper_forward._batched(q, z, s, c, precision="high", plan=None)
    for i in range(3):
        ref = direction(*(np.asarray(t[i], np.float64) for t in (q, z, s, c)))
        assert relative(out[i], ref) < 2e-5


@pytest.mark.parametrize(
    "n, d, changes",
    [
        (150, 4, {}),
        (150, 4, {"half_exponent": False, "splits": 1}),
        (130, 20, {"warpgroups": 2, "cut_bits": False}),
        (150, 64, {}),
        (100, 100, {}),
        (70, 128, {"splits": 1}),
    ],
)
@pytest.mark.parametrize("precision, limit", [("high", 3e-5), ("default", 2e-2)])
def test_backward_body(monkeypatch, n, d, changes, precision, limit):
    emulate(monkeypatch, hopper_backward)
    _, z, s, c, g = problem(n, n, d)
    layout, tiles = hopper_tiles.backward_tiles(n, d, precision)
    plan = layout, dataclasses.replace(tiles, **changes)
    arrays = [jnp.asarray(t)[None] for t in (z, s, c, g)]
    dz, ds, rows = hopper_backward._batched(*arrays, precision=precision, plan=plan)
    out = dz, ds, jnp.sum(arrays[0] * rows, axis=1)
    assert [o.shape for o in out] == [(1, n, d), (1, n, d), (1, d)]
    for o, ref in zip(out, cotangents(z, s, c, g), strict=True):
        assert relative(o[0], ref) < limit


def test_the_reference_cotangents_are_the_gradient():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        _, z, s, c, g = (np.asarray(t, np.float64) for t in problem(20, 20, 3))

        def total(z, s, c):
            diff = z[:, None] - z[None]
            k = jnp.exp(-0.5 * jnp.sum(diff**2, -1))
            return jnp.sum(g * (k @ s + c * jnp.einsum("ij,ijd->id", k, diff))) / len(z)

        exact = jax.grad(total, (0, 1, 2))(z, s, c)
        for a, b in zip(exact, cotangents(z, s, c, g), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=1e-10, atol=1e-14)
