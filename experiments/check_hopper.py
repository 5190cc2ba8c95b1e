"""Proves the Hopper kernels against float64, then times them beside XLA: one H200, JAX >= 0.11.

    python -m experiments.check_hopper [--only prove|time] [--match TEXT]

Inputs are fresh N(0, I) particles with s = -x + 0.1 noise and a bandwidth near median / log N.
Errors: ||out - ref|| / ||ref|| on up to 256 rows, and the largest |out - ref| over the sum of the terms'
magnitudes. Times: per call inside a jitted loop, median of 3. Exits with 1 if a proof fails.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import hopper_backward, hopper_forward, hopper_tiles

SEED = int.from_bytes(os.urandom(4), "little")


def problem(n, d, m=None, batch=(), offset=0.0):
    """Standardised float32 queries, particles, scores, c and cotangents, as numpy arrays."""
    rng = np.random.default_rng([SEED, n, d])
    h = 2 * d * (1 - 2 / (9 * d)) ** 3 / max(math.log(n), 1.0)
    x = rng.standard_normal((*batch, n, d)).astype(np.float32)
    s = (-x + 0.1 * rng.standard_normal(x.shape)).astype(np.float32)
    z = (x / np.sqrt(h) + offset).astype(np.float32)
    q = z if m is None else rng.standard_normal((*batch, m, d)).astype(np.float32) / np.sqrt(h)
    c = (np.ones((*batch, d)) / np.sqrt(h) * rng.uniform(0.5, 1.5, d)).astype(np.float32)
    g = rng.standard_normal(x.shape).astype(np.float32)
    return q.astype(np.float32), z, s, c, g


def exact_direction(q, z, s, c, rows):
    """float64 direction and sum of the terms' magnitudes at the first rows."""
    with jax.enable_x64(True):
        q, z, s, c = (jnp.asarray(np.asarray(t, np.float64)) for t in (q[:rows], z, s, c))

        @jax.jit
        def one(y):
            diff = y - z
            k = jnp.exp(-0.5 * jnp.sum(diff * diff, 1))
            phi = k @ s + k @ (c * diff)
            return phi / len(z), (k @ jnp.abs(s) + k @ jnp.abs(c * diff)) / len(z)

        return jax.tree.map(np.asarray, jax.jit(lambda q: lax.map(one, q))(q))


def exact_cotangents(z, s, c, g):
    """float64 cotangents by differentiating the dense formula (N up to about 2000)."""
    with jax.enable_x64(True):
        z, s, c, g = (jnp.asarray(np.asarray(t, np.float64)) for t in (z, s, c, g))

        def total(z, s, c):
            diff = z[:, None] - z[None]
            k = jnp.exp(-0.5 * jnp.sum(diff * diff, -1))
            return jnp.sum(g * (k @ s + jnp.einsum("ij,ijd->id", k, c * diff))) / len(z)

        return jax.tree.map(np.asarray, jax.jit(jax.grad(total, (0, 1, 2)))(z, s, c))


def exact_rows(z, s, c, g, rows):
    """float64 dz and ds at the first rows, by the matrix formula in NumPy (any N)."""
    z, s, c, g = (np.asarray(t, np.float64) for t in (z, s, c, g))
    n, p = len(z), slice(0, rows)
    v, gn = s - c * z, g / n
    t = np.sum(gn * c * z, 1)
    half = 0.5 * np.sum(z * z, 1)
    k = np.exp(z[p] @ z.T - half[p, None] - half)
    w = k * (gn[p] @ v.T + v[p] @ gn.T + t[p, None] + t)
    kg = k @ gn
    return w @ z - w.sum(1)[:, None] * z[p] + c * (k.sum(1)[:, None] * gn[p] - kg), kg


def relative(out, ref):
    out = np.asarray(out, np.float64)[: len(ref)]
    return float(np.linalg.norm(out - ref) / np.linalg.norm(ref))


# ------------------------------------------------------------------------------------------- XLA
def xla_direction(q, z, s, c):
    k = jnp.exp(
        -jnp.maximum(
            0.5 * jnp.sum(q * q, 1)[:, None]
            + 0.5 * jnp.sum(z * z, 1)
            - jnp.matmul(q, z.T, precision="highest"),
            0,
        )
    )
    v = jnp.matmul(k, s - c * z, precision="highest")
    return (v + jnp.sum(k, 1)[:, None] * (c * q)) / len(z)


def xla_blocked(q, z, s, c, rows=2048):
    blocks = q.reshape(-1, min(rows, len(q)), q.shape[1])
    return lax.map(lambda b: xla_direction(b, z, s, c), blocks).reshape(q.shape)


# ----------------------------------------------------------------------------------------- proofs
def forward_cases():
    high, default = ("high", 4e-5, 3e-6), ("default", 3e-2, 3e-3)
    square = [
        (64, 3), (70, 130), (3000, 4), (1025, 9), (1500, 13), (999, 31), (2047, 50), (4096, 64),
        (2500, 128), (2100, 190), (16384, 4), (16384, 64), (65536, 64), (65536, 2),
    ]  # fmt: skip
    queries = [(1000, 777, 64), (777, 1001, 2), (1300, 2111, 100), (3001, 640, 256)]
    for n, m, d in [(n, None, d) for n, d in square] + queries:
        yield n, m, d, (), high
    for n, m, d in [(3000, None, 4), (1000, 777, 64), (2100, None, 200)]:
        yield n, m, d, (), default
    yield 200, None, 20, (5,), high
    yield 130, None, 3, (2, 3), high


def vmapped(f, batch):
    for _ in batch:
        f = jax.vmap(f)
    return f


def prove_forward(n, m, d, batch, contract):
    precision, limit, limit_terms = contract
    if n < 1000:  # 16-bit halves lose up to 2^-16 of a term, which few terms do not average out
        limit_terms = max(limit_terms, 2.5e-5)
    q, z, s, c, _ = problem(n, d, m, batch)

    def direction(q, z, s, c):
        # The same array twice, as the op passes it, shares the packed operands.
        return hopper_forward.forward(z if m is None else q, z, s, c, precision=precision)

    compiled = jax.jit(vmapped(direction, batch)).lower(q, z, s, c).compile()

    def run():
        out = np.asarray(compiled(q, z, s, c))
        same = all((np.asarray(compiled(q, z, s, c)) == out).all() for _ in range(3))
        index = (-1,) * len(batch)
        rows = min(256, len(q[index]))
        ref, magnitude = exact_direction(q[index], z[index], s[index], c[index], rows)
        last = exact_direction(q[index][-1:], z[index], s[index], c[index], 1)
        e1 = relative(out[index], ref)
        e2 = float(np.max(np.abs(out[index][:rows] - ref) / magnitude))
        e2 = max(e2, float(np.max(np.abs(out[index][-1] - last[0]) / last[1])))
        ok = same and e1 <= limit and e2 <= limit_terms and np.isfinite(out).all()
        return ok, {"error": e1, "error_terms": e2, "same_bits": same}

    return run


def backward_cases():
    for n, d in [(1024, 64), (777, 5), (64, 4), (333, 33), (1100, 128), (900, 16)]:
        yield n, d, (), "high", 5e-5
    yield 777, 64, (), "default", 5e-2
    yield 150, 20, (2, 2), "high", 5e-5
    yield 16384, 64, (), "high", 5e-5
    yield 65536, 64, (), "high", 1e-4


def prove_backward(n, d, batch, precision, limit):
    _, z, s, c, g = problem(n, d, None, batch)

    def cotangents(z, s, c, g):
        dz, ds, rows = hopper_backward.backward(z, s, c, g, precision=precision)
        return dz, ds, jnp.sum(z * rows, axis=0)

    f = jax.jit(vmapped(cotangents, batch))
    compiled = f.lower(z, s, c, g).compile()

    def run():
        out = jax.tree.map(np.asarray, compiled(z, s, c, g))
        same = all(
            all((np.asarray(a) == b).all() for a, b in zip(compiled(z, s, c, g), out, strict=True))
            for _ in range(3)
        )
        i = (-1,) * len(batch)
        if n <= 1600:
            ref = exact_cotangents(z[i], s[i], c[i], g[i])
        else:
            ref = exact_rows(z[i], s[i], c[i], g[i], 256)
        errors = [relative(o[i], r) for o, r in zip(out[: len(ref)], ref, strict=True)]
        finite = all(np.isfinite(o).all() for o in out)
        return same and finite and max(errors) <= limit, {"errors": errors, "same_bits": same}

    return run


# ----------------------------------------------------------------------------------------- times
def timed(step, *arrays):
    """step maps arrays to arrays of the same shapes; returns a runner of milliseconds per call."""

    @jax.jit
    def loop(arrays, k):
        return lax.fori_loop(0, k, lambda _, a: step(*a), arrays)

    compiled = loop.lower(arrays, 1).compile()

    def run():
        def once(k):
            start = time.perf_counter()
            jax.block_until_ready(compiled(arrays, k))
            return (time.perf_counter() - start) / k

        once(1)
        k = int(max(2, min(2000, 0.12 / max(once(3), 1e-6))))
        return sorted(once(k) for _ in range(3))[1] * 1e3

    return run


@functools.cache
def exact_once(n, d):
    _, z, s, c, _ = problem(n, d)
    return exact_direction(z, z, s, c, 128)


def time_direction(n, d, batch, f):
    """A runner of (milliseconds, error); the error is left out for batches."""
    _, z, s, c, _ = problem(n, d, None, batch)
    arrays = tuple(map(jnp.asarray, (z, s, c)))
    f = vmapped(f, batch)
    once = jax.jit(lambda z, s, c: f(z, z, s, c)).lower(*arrays).compile()
    loop = timed(lambda z, s, c: (z + 1e-6 * f(z, z, s, c), s, c), *arrays)

    def run():
        error = None if batch else relative(once(*arrays), exact_once(n, d)[0])
        return loop(), error

    return run


def time_gradient(n, d, forward, backward):
    _, z, s, c, g = map(jnp.asarray, problem(n, d))

    def step(z, s, c, g):
        if forward is not None:
            g = g + 1e-6 * forward(z, z, s, c)
        dz, ds, dc = backward(z, s, c, g)
        dc = jnp.sum(z * dc, axis=0) if dc.ndim == 2 else dc
        return z + 1e-6 * dz, s + 1e-6 * ds, c + 1e-9 * dc, g

    return timed(step, z, s, c, g)


def xla_gradient(z, s, c, g):
    return jax.vjp(lambda z, s, c: xla_direction(z, z, s, c), z, s, c)[1](g)


def forward_variants():
    """(name, n, d, batch, changes of the table's tiles)."""
    sizes = [
        (1024, 32), (4096, 64), (16384, 64), (65536, 64),
        (16384, 128), (16384, 256), (65536, 4), (65536, 2),
    ]  # fmt: skip
    yield from [(f"{n}x{d}", n, d, (), {}) for n, d in sizes]
    yield "64x256x32", 256, 32, (64,), {}
    yield "256x128x16", 128, 16, (256,), {}


def tiles_with(n, d, batch, changes):
    layout, tiles = hopper_tiles.forward_tiles(n, n, d, "high", math.prod(batch))
    return layout, dataclasses.replace(tiles, **changes)


def time_cases(extra):
    def direction(name, n, d, batch, changes):
        tiles = tiles_with(n, d, batch, changes) if changes else None

        def f(q, z, s, c):
            return hopper_forward.forward(q, z, s, c, tiles=tiles)

        return f"direction {name} {changes or ''}", lambda: time_direction(n, d, batch, f)

    yield from (direction(*case) for case in forward_variants())
    sizes = [(1024, 32, ()), (4096, 64, ()), (16384, 64, ()), (65536, 64, ()), (256, 32, (64,))]
    for n, d, batch in sizes:
        f = xla_direction if n <= 16384 else xla_blocked
        yield (
            f"direction {n}x{d} {batch} XLA float32",
            lambda n=n, d=d, b=batch, f=f: time_direction(n, d, b, f),
        )
    for n in (4096, 16384):
        layout, tiles = hopper_tiles.backward_tiles(n, 64, "high")
        tiles = layout, dataclasses.replace(tiles, cut_bits=not tiles.cut_bits)
        f = functools.partial(hopper_backward.backward, tiles=tiles)
        yield (
            f"backward {n}x64 cut_bits={tiles[1].cut_bits}",
            lambda n=n, f=f: time_gradient(n, 64, None, f),
        )
    for n, d in [(1024, 32), (4096, 64), (16384, 64), (65536, 64)]:
        both = (hopper_forward.forward, hopper_backward.backward)
        yield f"gradient {n}x{d}", lambda n=n, d=d, both=both: time_gradient(n, d, *both)
        yield f"backward {n}x{d}", lambda n=n, d=d, both=both: time_gradient(n, d, None, both[1])
        if n <= 16384:
            yield (
                f"gradient {n}x{d} XLA float32",
                lambda n=n, d=d: time_gradient(n, d, None, xla_gradient),
            )
    yield from (direction(*case) for case in extra)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=["prove", "time"])
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--tiles", default="[]", help="further [n, d, batch, changes] cases as JSON, or @file"
    )
    options = parser.parse_args()
    text = options.tiles
    if text.startswith("@"):
        with open(text[1:]) as file:
            text = file.read()
    extra = [(f"{n}x{d}", n, d, tuple(b), c) for n, d, b, c in json.loads(text)]
    cases = []
    if options.only != "time":
        cases += [(f"forward {c}", lambda c=c: prove_forward(*c)) for c in forward_cases()]
        cases += [(f"backward {c}", lambda c=c: prove_backward(*c)) for c in backward_cases()]
    if options.only != "prove":
        cases += time_cases(extra)
    cases = [(name, build) for name, build in cases if options.match in name]

    def build(case):
        start = time.perf_counter()
        try:
            return case[0], case[1](), time.perf_counter() - start
        except Exception:
            return case[0], traceback.format_exc(), time.perf_counter() - start

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        built = list(pool.map(build, cases))
    print(
        f"seed {SEED}, {jax.devices()[0].device_kind}, JAX {jax.__version__}, "
        f"{len(built)} cases built in {time.perf_counter() - start:.1f} s",
        flush=True,
    )
    rows, failed = [], 0
    for name, run, seconds in built:
        row = {"case": name, "build_s": round(seconds, 2)}
        try:
            if isinstance(run, str):
                raise RuntimeError(run[-1500:])
            result = run()
            if isinstance(result, float):
                row |= {"ms": result}
            elif isinstance(result[1], dict):
                row |= dict(ok=bool(result[0]), **result[1])
            else:
                row |= {"ms": result[0], "error": result[1]}
        except Exception as error:
            row |= {"ok": False, "failure": str(error)[-1500:]}
        failed += row.get("ok") is False
        rows.append(row)
        shown = {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in row.items()}
        del shown["case"]
        print(f"{name:60s} {shown}", flush=True)
    if "OUT" in os.environ:
        with open(os.path.join(os.environ["OUT"], "check_hopper.json"), "w") as file:
            json.dump({"seed": SEED, "jax": jax.__version__, "rows": rows}, file, indent=1)
    print(f"{failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
