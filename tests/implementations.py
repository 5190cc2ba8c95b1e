"""What the tests of the direction share: the implementations here, and what each may round."""

import jax
import jax.numpy as jnp
import pytest

import jsvgd

ON_GPU = jax.default_backend() == "gpu"
COMPILED = ["triton", "mosaic_gpu"] if ON_GPU else []
IMPLEMENTATIONS = [None, "xla", "interpret", *COMPILED]
PRODUCTS_IN_FLOAT32 = {"xla", "dense"} | (set() if ON_GPU else {None})
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
