"""Proves the portable Pallas kernels on this GPU, then times them beside XLA in the same run.

    python -m experiments.check_triton              correctness, then the tile table's own choices
    python -m experiments.check_triton --tune       also other tiles: the source of triton_tiles.py

Inputs are fresh random draws: z = x / sqrt(h), x ~ N(0, I), h the median rule's, s = -x + 0.1 noise.
"error" is ||out - ref64|| / ||ref64|| on 64 to 256 rows. Times are per call inside a jitted loop,
median of 3. The backward kernels are timed alone; XLA's line beside them is forward and backward.
"""

import argparse
import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import triton_backward, triton_forward, triton_tiles


def weights(kernel, distance):
    """f, -f' and f'' at u = distance / 2."""
    if kernel == "rbf":
        return (np.exp(-distance / 2),) * 3
    t = 1 + distance
    return t**-0.5, t**-1.5, 3 * t**-2.5


def draw(rng, n, d, batch=()):
    """z, s, c, g in float32, as jsvgd's median rule would scale them."""
    x = rng.standard_normal((*batch, n, d))
    sample = x.reshape(-1, n, d)[0, :512]
    distance = ((sample[:, None] - sample[None]) ** 2).sum(-1)
    h = max(np.median(distance), 1e-5) / max(np.log(n), 1.0)
    s = -x + 0.1 * rng.standard_normal(x.shape)
    g = rng.standard_normal(x.shape)
    c = np.full((d,), 1 / np.sqrt(h))
    return tuple(jnp.asarray(a, jnp.float32) for a in (x / np.sqrt(h), s, c, g))


def distances(z, rows):
    z = z - z.mean(0)
    norm = (z * z).sum(1)
    return np.maximum(norm[rows, None] + norm[None] - 2 * z[rows] @ z.T, 0)


def forward64(z, s, c, kernel, rows):
    z, s, c = (np.asarray(a, np.float64) for a in (z, s, c))
    f, w, _ = weights(kernel, distances(z, rows))
    return (f @ s + c * (w.sum(1)[:, None] * z[rows] - w @ z)) / len(z)


def backward64(z, s, c, g, kernel, rows):
    """dz and ds of some rows."""
    z, s, c, g = (np.asarray(a, np.float64) for a in (z, s, c, g))
    gn = g / len(z)
    f, w, curvature = weights(kernel, distances(z, rows))
    cg = c * gn
    own = (cg * z).sum(1)
    cross = own[rows, None] + own[None] - cg[rows] @ z.T - z[rows] @ cg.T
    weight = w * (gn[rows] @ s.T + s[rows] @ gn.T) + curvature * cross
    t = w.sum(1)[:, None] * gn[rows] - w @ gn
    return weight @ z - weight.sum(1)[:, None] * z[rows] + c * t, f @ gn


def relative(out, ref):
    out = np.asarray(out, np.float64)
    return (
        float(np.linalg.norm(out - ref) / np.linalg.norm(ref))
        if np.isfinite(out).all()
        else float("nan")
    )


def poison():
    """Leaves NaN in freed device memory, where the next outputs are allocated."""
    jax.block_until_ready([jnp.full((1 << k,), jnp.nan, jnp.float32) for k in range(8, 27)])


def xla_rbf(z, s, c):
    """The rbf Gram form in XLA: row blocks where an N x N array would be too large."""
    n = z.shape[0]
    norm = jnp.sum(z * z, 1)
    v = s - c * z

    def block(args):
        q, a = args
        f = jnp.exp(
            -jnp.maximum(a[:, None] + norm[None] - 2 * jnp.matmul(q, z.T, precision="highest"), 0)
            / 2
        )
        return (jnp.matmul(f, v, precision="highest") + jnp.sum(f, 1)[:, None] * c * q) / n

    if n <= 16384:
        return block((z, norm))
    return lax.map(block, (z.reshape(-1, 2048, z.shape[1]), norm.reshape(-1, 2048))).reshape(
        z.shape
    )


def seconds(f, z, *rest):
    """Time of one call f(z, *rest) inside a loop whose every turn depends on the last."""

    @jax.jit
    def loop(z, count, *rest):
        return lax.fori_loop(0, count, lambda _, z: z + 1e-6 * f(z, *rest), z)

    jax.block_until_ready(loop(z, 1, *rest))
    start = time.perf_counter()
    jax.block_until_ready(loop(z, 3, *rest))
    count = max(3, min(2000, int(0.06 / max((time.perf_counter() - start) / 3, 1e-6))))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(loop(z, count, *rest))
        times.append((time.perf_counter() - start) / count)
    return sorted(times)[1]


def check(rng, report):
    """Correctness: ragged, vmapped, split, deterministic; both passes and kernels, all precisions."""
    limits = {"highest": 2e-5, "high": 4e-5, "default": 3e-2}
    for n, d, family in [
        (1000, 3, "direct"),
        (777, 5, "dot"),
        (1500, 33, "dot"),
        (256, 100, "dot"),
        (600, 16, "direct"),
        (5000, 2, "direct"),
    ]:
        for kernel in ("rbf", "imq"):
            for precision in ("high",) if family == "direct" else ("highest", "high", "default"):
                name = f"{kernel} {n}x{d} {family} {precision}"
                try:
                    z, s, c, g = draw(rng, n, d)
                    rows = slice(0, n)
                    poison()
                    run = jax.jit(
                        functools.partial(
                            triton_forward.forward,
                            kernel=kernel,
                            precision=precision,
                            family=family,
                        )
                    )
                    out = run(z[: n - 7], z, s, c)
                    e = [relative(out, forward64(z, s, c, kernel, rows)[: n - 7])]
                    pull = jax.jit(
                        functools.partial(
                            triton_backward.backward,
                            kernel=kernel,
                            precision=precision,
                            family=family,
                        )
                    )
                    poison()
                    dz, ds, _ = pull(z, s, c, g)
                    e += [
                        relative(a, b)
                        for a, b in zip((dz, ds), backward64(z, s, c, g, kernel, rows), strict=True)
                    ]
                    same = all(bool(jnp.all(run(z[: n - 7], z, s, c) == out)) for _ in range(10))
                    ok = max(e) <= 3 * limits[precision] and e[0] <= limits[precision] and same
                    report(f"check {name}", ok=ok, errors=e, same=same)
                except Exception as error:
                    report(
                        f"check {name}", ok=False, error=f"{type(error).__name__}: {error}"[:300]
                    )
    try:
        z, s, c, g = draw(rng, 300, 20, (5,))
        f = functools.partial(triton_forward.forward, kernel="rbf", precision="high")
        out = jax.jit(jax.vmap(f, in_axes=(0, 0, 0, None)))(z, z, s, c)
        e = [relative(out[b], forward64(z[b], s[b], c, "rbf", slice(0, 300))) for b in range(5)]
        report("check vmap of five chains", ok=max(e) <= 4e-5, errors=[max(e)])
    except Exception as error:
        report("check vmap", ok=False, error=f"{type(error).__name__}: {error}"[:300])


def time_forward(rng, report, n, d, kernel, precision, choices, batch=()):
    z, s, c, _ = draw(rng, n, d, batch)
    lift = (lambda f: jax.vmap(f, in_axes=(0, 0, None))) if batch else (lambda f: f)
    rows = slice(0, min(n, 256 if n * d < 4e6 else 64))
    first = (0,) * len(batch)
    ref = forward64(z[first], s[first], c, kernel, rows)
    title = f"forward {kernel} {'x'.join(map(str, (*batch, n, d)))} {precision}"
    base = float("nan")
    if kernel == "rbf":
        base = seconds(lift(xla_rbf), z, s, c)
        report(
            f"{title} XLA float32",
            ms=base * 1e3,
            error=relative(jax.jit(lift(xla_rbf))(z, s, c)[first][rows], ref),
        )
    for choice in choices:
        chosen = choice or triton_tiles.forward_tiles(kernel, n, n, d, precision)
        run = lift(
            lambda z, s, c, chosen=chosen: triton_forward.forward(
                z, z, s, c, kernel=kernel, precision=precision, choice=chosen
            )
        )
        label = f"{title} {'table ' if choice is None else ''}{short(chosen)}"
        try:
            poison()
            e = relative(jax.jit(run)(z, s, c)[first][rows], ref)
            t = seconds(run, z, s, c)
            report(label, ms=t * 1e3, ratio=base / t, error=e)
        except Exception as error:
            report(label, error=f"{type(error).__name__}: {error}"[:200])


def xla_pull(z, s, c, g):
    return jax.vjp(xla_rbf, z, s, c)[1](g)


def time_backward(rng, report, n, d, kernel, precision, choices):
    z, s, c, g = draw(rng, n, d)
    rows = slice(0, min(n, 256 if n * d < 4e6 else 64))
    ref = backward64(z, s, c, g, kernel, rows)
    title = f"backward {kernel} {n}x{d} {precision}"
    if kernel == "rbf" and n <= 16384:
        both = seconds(lambda *a: sum(xla_pull(*a)), z, s, c, g)
        report(f"{title} XLA float32, forward and backward", ms=both * 1e3)
    for choice in choices:
        chosen = choice or triton_tiles.backward_tiles(kernel, n, d, precision)
        run = functools.partial(
            triton_backward.backward, kernel=kernel, precision=precision, choice=chosen
        )
        label = f"{title} {'table ' if choice is None else ''}{short(chosen)}"
        try:
            poison()
            dz, ds, _ = jax.jit(run)(z, s, c, g)
            e = max(relative(dz[rows], ref[0]), relative(ds[rows], ref[1]))
            t = seconds(lambda *a, run=run: sum(run(*a)), z, s, c, g)
            report(label, ms=t * 1e3, error=e)
        except Exception as error:
            report(label, error=f"{type(error).__name__}: {error}"[:200])


def short(t):
    return f"{t.family} bm{t.bm} bn{t.bn} w{t.warps} st{t.stages} sp{t.splits} u{t.unroll}"


def dot(bm, bn, warps, stages, splits=1):
    return triton_tiles.Tiles("dot", bm, bn, warps, stages, splits)


def direct(rows, warps, unroll, splits=1):
    return triton_tiles.Tiles("direct", rows * warps, triton_tiles.LANES, warps, 1, splits, unroll)


# What is timed: (pass, n, d, kernel, precision, batch, other tiles tried under --tune).
CASES = [
    (
        "f",
        65536,
        4,
        "rbf",
        "high",
        (),
        [direct(8, 8, 4, 4), direct(16, 4, 4, 4), direct(8, 4, 8, 4)],
    ),
    (
        "f",
        65536,
        2,
        "rbf",
        "high",
        (),
        [direct(8, 4, 4, 4), direct(16, 4, 4, 4), direct(8, 8, 8, 8)],
    ),
    ("f", 256, 32, "rbf", "high", (64,), []),
    ("f", 1024, 32, "rbf", "high", (), [dot(64, 64, 4, 3, 4), dot(64, 128, 4, 2, 8)]),
    ("f", 128, 16, "rbf", "high", (256,), [dot(128, 128, 8, 1)]),
    ("b", 65536, 4, "rbf", "high", (), [direct(2, 4, 2, 4), direct(4, 8, 2, 4)]),
    ("f", 65536, 64, "rbf", "high", (), []),
    ("f", 16384, 64, "rbf", "high", (), [dot(64, 64, 4, 4)]),
    ("f", 4096, 64, "rbf", "high", (), [dot(64, 64, 4, 3, 6)]),
    ("b", 16384, 64, "rbf", "high", (), []),
    ("b", 4096, 64, "rbf", "high", (), [dot(64, 32, 4, 2, 6)]),
    ("b", 1024, 32, "rbf", "high", (), [dot(64, 32, 4, 2, 4), dot(64, 64, 4, 1, 8)]),
    ("f", 65536, 8, "rbf", "high", (), [direct(8, 4, 1, 4), dot(64, 64, 4, 3)]),
    ("f", 65536, 4, "imq", "high", (), [direct(4, 4, 4, 4), dot(64, 64, 4, 3)]),
    ("f", 16384, 64, "imq", "high", (), [dot(64, 64, 4, 2), dot(64, 32, 4, 3)]),
    ("f", 16384, 128, "rbf", "high", (), [dot(64, 32, 4, 2), dot(128, 64, 8, 2)]),
    ("b", 65536, 8, "rbf", "high", (), [dot(64, 32, 4, 2), dot(64, 64, 4, 1)]),
    ("f", 1024, 2, "rbf", "high", (), []),
    ("f", 16384, 256, "rbf", "high", (), [dot(64, 32, 8, 1), dot(128, 32, 8, 1)]),
    ("b", 16384, 128, "rbf", "high", (), [dot(64, 32, 4, 1), dot(64, 16, 4, 1)]),
    ("b", 16384, 64, "imq", "high", (), [dot(64, 32, 4, 1), dot(64, 32, 8, 2)]),
    ("f", 4096, 64, "rbf", "highest", (), []),
    ("b", 2048, 32, "rbf", "highest", (), []),
    ("f", 16384, 64, "rbf", "default", (), []),
    ("f", 65536, 16, "rbf", "high", (), [direct(2, 4, 1, 4)]),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="time other tiles too")
    parser.add_argument(
        "--seconds", type=float, default=300, help="start no new case after this long"
    )
    parser.add_argument("--json", help="file for the full results")
    args = parser.parse_args()
    start, lines = time.perf_counter(), []

    def report(name, **values):
        lines.append({"case": name, **values})
        print(f"{time.perf_counter() - start:6.1f}s {name}: {values}", flush=True)

    rng = np.random.default_rng(time.time_ns() % (1 << 32))
    check(rng, report)
    for kind, n, d, kernel, precision, batch, others in CASES:
        if time.perf_counter() - start > args.seconds:
            break
        choices = [None, *(others if args.tune else [])]
        try:
            if kind == "f":
                time_forward(rng, report, n, d, kernel, precision, choices, batch)
            else:
                time_backward(rng, report, n, d, kernel, precision, choices)
        except Exception as error:
            report(
                f"{kind} {kernel} {n}x{d} {precision}",
                error=f"{type(error).__name__}: {error}"[:200],
            )
        if args.json:
            with open(args.json, "w") as file:
                json.dump(
                    {
                        "device": str(jax.devices()[0].device_kind),
                        "jax": jax.__version__,
                        "rows": lines,
                    },
                    file,
                    indent=1,
                )
    failed = [x["case"] for x in lines if x.get("ok") is False]
    print(f"\n{'case':86} {'ms':>9} {'xla/this':>8} {'error':>9}")
    for x in lines:
        ratio, e = x.get("ratio", float("nan")), x.get("error", float("nan"))
        if "ms" in x:
            print(f"{x['case'][:86]:86} {x['ms']:9.4f} {ratio:8.2f} {e:9.1e}")
        elif "ok" not in x:
            print(f"{x['case'][:86]:86} {e[:60]}")
    print("failed checks:", failed or "none")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
