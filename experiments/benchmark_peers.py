"""What else a user could pick: the formula written in XLA, a PyTorch program, BlackJAX."""

from __future__ import annotations

import math
import time

import jax
import jax.numpy as jnp
import numpy as np

import jsvgd
from experiments.timing import compiled_loop, seconds_of_calls, seconds_of_loop

__all__ = ["MOST_IN_BLACKJAX", "STEPS", "baselines", "measure_steps", "prepare_steps"]

STEPS = [(1024, 32), (4096, 64)]

# BlackJAX's step holds the indices of all pairs as constants, which XLA folds for minutes beyond.
MOST_IN_BLACKJAX = 3000


def baselines(chains, n, work):
    if n > 65536 or (work == "gradient" and n > 16384):
        return {}  # their N x N arrays do not fit, or take too long to be of interest
    named = {"XLA float32": gram_direction("highest"), "XLA TF32": gram_direction("default")}
    return {k: jax.vmap(f, (0, 0, None)) if chains > 1 else f for k, f in named.items()}


def gram_direction(precision):
    """What one writes in XLA without a library: centred Gram form, row blocks where N is large."""

    def rows(q, x, v, h):
        norms = lambda a: jnp.sum(a * a, axis=1)
        products = jnp.matmul(q, x.T, precision=precision)
        k = jnp.exp(-jnp.maximum(norms(q)[:, None] + norms(x)[None] - 2 * products, 0) / (2 * h))
        return jnp.matmul(k, v, precision=precision) + jnp.sum(k, axis=1)[:, None] * q / h

    def direction(x, s, h):
        n, d = x.shape
        x = x - jnp.mean(x, axis=0)
        v = s - x / h
        if n < 32768:
            return rows(x, x, v, h) / n
        blocks = x.reshape(-1, 2048, d)
        return jax.lax.map(lambda q: rows(q, x, v, h), blocks).reshape(n, d) / n

    return direction


def prepare_steps(n, d) -> dict[str, tuple]:
    """Whole steps, median bandwidth included: name -> jitted step, state and the compiled loop of steps."""
    x = jax.random.normal(jax.random.key(0), (n, d))

    def update(x):
        return jsvgd.svgd_update(x, -x, jsvgd.median_bandwidth(x), 1e-3)

    steps = {"jsvgd": (update, x), "XLA with a sort": (step_with_sort, x)}
    if n <= MOST_IN_BLACKJAX:
        try:
            import blackjax
            import optax
        except ImportError:
            print("BlackJAX is not installed: it is not measured")
        else:
            algorithm = blackjax.svgd(lambda p: -p, optax.sgd(1e-3))
            steps["BlackJAX"] = algorithm.step, algorithm.init(x)
    prepared = {}
    for name, (step, state) in steps.items():
        jitted = jax.jit(step)
        jax.block_until_ready(jitted(state))  # compiled here, beside other compilations
        prepared[name] = jitted, state, compiled_loop(step, state)
    return prepared


def measure_steps(n, d, steps, report):
    """Whole steps from `prepare_steps`, in a compiled loop and called one by one, and the PyTorch program."""
    for name, (step, state, loop) in steps.items():
        report(
            name,
            milliseconds=1e3 * seconds_of_loop(loop, state),
            called=1e3 * seconds_of_calls(step, state),
        )
    try:
        import torch
    except ImportError:
        print("PyTorch is not installed: its program is not measured")
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = np.asarray(jax.random.normal(jax.random.key(0), (n, d)))
    milliseconds = 1e3 * torch_seconds(torch, x, device)
    report("PyTorch program", milliseconds=milliseconds, called=milliseconds)


def step_with_sort(x):
    """The same step as one writes it in XLA."""
    n = x.shape[0]
    norms = jnp.sum(x * x, axis=1)
    products = jnp.matmul(x, x.T, precision="highest")
    distances = jnp.maximum(norms[:, None] + norms[None] - 2 * products, 0)
    median = jnp.sort(distances.ravel())[(n * n - 1) // 2]
    h = jnp.maximum(median, 1e-5) / max(math.log(n), 1.0)
    return x + 1e-3 * gram_direction("highest")(x, -x, h)


def torch_seconds(torch, x, device, count=20):
    x = torch.tensor(x, device=device)

    def step(x):
        diff = x.unsqueeze(0) - x.unsqueeze(1)
        dist_sq = (diff**2).sum(-1)
        h = torch.median(dist_sq.view(-1)).clamp(min=1e-5) / max(math.log(x.shape[0]), 1.0)
        k = torch.exp(-dist_sq / (2 * h))
        return (k @ -x + (-diff / h * k.unsqueeze(-1)).sum(dim=1)) / x.shape[0]

    def wait():
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        step(x)
    wait()
    start = time.perf_counter()
    for _ in range(count):
        step(x)
    wait()
    return (time.perf_counter() - start) / count
