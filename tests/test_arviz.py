"""Export to ArviZ: names, coordinates and groups; the summary and loo; what is said without it."""

import subprocess
import sys
import types
import typing

import jax
import numpy as np
import pytest
import scipy.stats

import jsvgd

RNG = np.random.default_rng(0)
NORMAL = RNG.normal(size=(60, 3)).astype(np.float32)


def test_without_arviz_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match=r"needs ArviZ 1.*pip install 'jsvgd\[arviz\]'") as raised:
        jsvgd.to_arviz(NORMAL)
    assert "\n" not in str(raised.value)
    monkeypatch.setitem(sys.modules, "arviz", types.SimpleNamespace(__version__="0.23.4"))
    with pytest.raises(ImportError, match=r"found ArviZ 0\.23\.4: pip install 'jsvgd\[arviz\]'"):
        jsvgd.to_arviz(NORMAL)


def test_nothing_optional_is_imported_with_the_package():
    optional = ("arviz", "xarray", "orbax", "flax", "tqdm", "blackjax", "matplotlib")
    code = f"import sys, jsvgd; print([m for m in {optional} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.fixture
def az():
    if sys.version_info < (3, 12):
        pytest.skip("ArviZ 1 needs Python 3.12")
    return pytest.importorskip("arviz", minversion="1.0", reason="ArviZ 1 is not installed")


def test_variables_are_named_by_path_or_by_the_user(az):
    tree = {"layer": {"kernel": RNG.normal(size=(5, 2, 3)), "bias": RNG.normal(size=(5, 3))}}
    data = jsvgd.to_arviz(
        tree,
        coords={"unit": ["a", "b", "c"]},
        dims={"layer.bias": ["unit"]},
        attrs={"model": "test"},
    )
    posterior = data["posterior"]
    assert posterior["layer.kernel"].dims[:2] == ("chain", "draw")
    assert posterior["layer.kernel"].shape == (1, 5, 2, 3)
    np.testing.assert_array_equal(
        posterior["layer.bias"].sel(unit="b")[0], tree["layer"]["bias"][:, 1]
    )
    assert posterior.attrs["inference_library"] == "jsvgd"
    assert posterior.attrs["model"] == "test"
    named = jsvgd.to_arviz(NORMAL, names=["alpha", "beta", "sigma"])
    np.testing.assert_array_equal(named["posterior"]["sigma"][0], NORMAL[:, 2])
    assert list(jsvgd.to_arviz(NORMAL)["posterior"]) == ["x"]


def test_nnx_parameters_keep_their_names(az):
    from flax import nnx

    import jsvgd.flax

    params = jsvgd.flax.init_particles(
        jax.random.key(0), lambda rngs: nnx.Linear(2, 3, rngs=rngs), 4
    )
    assert sorted(jsvgd.to_arviz(params)["posterior"]) == ["bias", "kernel"]


def test_a_variable_called_value_is_no_node_of_nnx(az):
    class Pair(typing.NamedTuple):
        value: np.ndarray
        scale: np.ndarray

    x = NORMAL
    assert sorted(jsvgd.to_arviz(Pair(x, x))["posterior"]) == ["scale", "value"]
    assert sorted(jsvgd.to_arviz({"a": {"value": x, "b": x}})["posterior"]) == ["a.b", "a.value"]
    with pytest.raises(ValueError, match=r"variables at a/b and at a\.b would both be .*'a\.b'"):
        jsvgd.to_arviz({"a": {"b": x}, "a.b": 2 * x})


def test_bfloat16_and_one_particle_of_one_dimension(az):
    half = jax.numpy.asarray(NORMAL, jax.numpy.bfloat16)
    data = jsvgd.to_arviz(half, log_likelihood=half)
    assert data["posterior"]["x"].dtype == np.float32
    np.testing.assert_array_equal(data["posterior"]["x"][0], half.astype(np.float32))
    np.testing.assert_array_equal(data["log_likelihood"]["y"][0], half.astype(np.float32))
    one = jax.numpy.ones((1, 1))
    assert jsvgd.to_arviz(one, names=["a"])["posterior"]["a"].shape == (1, 1)
    assert jsvgd.to_arviz(one, log_likelihood=one)["log_likelihood"]["y"].shape == (1, 1, 1)
    assert jsvgd.to_arviz(one[None], chains=True)["posterior"]["x"].shape == (1, 1, 1)


def test_the_summary_is_that_of_the_particles(az):
    constrained = lambda p: {"mu": p[0], "sigma": jax.numpy.exp(p[1])}
    data = jsvgd.to_arviz(NORMAL, transform=constrained)
    summary = az.summary(data, round_to="none")
    np.testing.assert_allclose(summary.loc["mu", "mean"], NORMAL[:, 0].mean(), rtol=1e-4)
    np.testing.assert_allclose(
        summary.loc["sigma", "sd"], np.exp(NORMAL[:, 1]).std(ddof=1), rtol=1e-4
    )


def test_chains_are_compared(az):
    chains = RNG.normal(size=(4, 200, 2)).astype(np.float32)
    alike = az.rhat(jsvgd.to_arviz(chains, chains=True))
    assert float(alike["x"].max()) < 1.02
    chains[0] += 3
    apart = az.rhat(jsvgd.to_arviz(chains, chains=True))
    assert float(apart["x"].max()) > 1.3


@pytest.mark.filterwarnings("ignore:Estimated shape parameter")
def test_loo_is_near_the_exact_leave_one_out_density(az):
    """y ~ N(mu, 1), flat prior on mu: particles are exact draws, and loo has a closed form."""
    y = RNG.normal(size=30)
    mu = (y.mean() + RNG.normal(size=4000) / np.sqrt(30)).astype(np.float32)[:, None]
    log_likelihood = lambda p: jax.scipy.stats.norm.logpdf(y, p[0])
    data = jsvgd.to_arviz(
        mu,
        names=["mu"],
        log_likelihood={"y": log_likelihood},
        predictions={"y_new": lambda p: p[0] + np.zeros(7)},
        posterior_predictive={"y": mu + RNG.normal(size=(4000, 30))},
        observed_data={"y": y},
        coords={"row": np.arange(30)},
        dims={"y": ["row"]},
    )
    assert data["log_likelihood"]["y"].dims == ("chain", "draw", "row")
    assert {"posterior", "log_likelihood", "predictions", "observed_data"} <= set(data.children)
    np.testing.assert_allclose(
        data["log_likelihood"]["y"][0, 17], scipy.stats.norm.logpdf(y, mu[17, 0]), rtol=1e-4
    )
    others = (y.sum() - y) / 29
    exact = scipy.stats.norm.logpdf(y, others, np.sqrt(1 + 1 / 29)).sum()
    loo = az.loo(data, reff=1.0)
    np.testing.assert_allclose(loo.elpd, exact, atol=0.1)


def test_what_does_not_fit_is_named(az):
    with pytest.raises(ValueError, match="names must be 3 different names.*'b'"):
        jsvgd.to_arviz(NORMAL, names=["a", "b"])
    with pytest.raises(ValueError, match=r"log_likelihood\['y'\] must have shape \(60, \.\.\.\)"):
        jsvgd.to_arviz(NORMAL, log_likelihood=np.zeros((59, 4)))
    with pytest.raises(ValueError, match="must have a chain and a particle axis"):
        jsvgd.to_arviz(np.zeros(4), chains=True)
    with pytest.raises(ValueError, match="must agree in chains and particles"):
        jsvgd.to_arviz({"a": np.zeros((2, 5)), "b": np.zeros((2, 6))}, chains=True)
