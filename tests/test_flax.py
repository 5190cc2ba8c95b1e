"""jsvgd.flax: initialisation and apply against Flax itself, densities against SciPy and quadrature."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from flax import linen, nnx

import jsvgd.flax
from jsvgd.flax import Position


class NNXNetwork(nnx.Module):
    def __init__(self, num_hidden, *, rngs):
        self.hidden = nnx.Linear(3, num_hidden, rngs=rngs)
        self.output = nnx.Linear(num_hidden, 1, rngs=rngs)

    def __call__(self, x):
        return self.output(nnx.tanh(self.hidden(x)))


class LinenNetwork(linen.Module):
    num_hidden: int
    dropout: float = 0.0
    normalised: bool = False

    @linen.compact
    def __call__(self, x):
        x = linen.tanh(linen.Dense(self.num_hidden)(x))
        if self.normalised:
            x = linen.BatchNorm(use_running_average=True)(x)
        if self.dropout:
            x = linen.Dropout(self.dropout, deterministic=False)(x)
        return linen.Dense(1)(x)


INPUTS = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(4, 3)
NNX = functools.partial(NNXNetwork, 5)
LINEN = LinenNetwork(5)


def particle(tree, i):
    return jax.tree.map(lambda leaf: leaf[i], tree)


# --- particles ------------------------------------------------------------------------------------


def test_nnx_particles_are_what_the_constructor_makes_of_their_keys():
    key = jax.random.key(3)
    params = jsvgd.flax.init_particles(key, NNX, 4)
    network = jsvgd.flax.functional(NNX, INPUTS)
    for i, own_key in enumerate(jax.random.split(key, 4)):
        module = NNX(rngs=nnx.Rngs(own_key))
        np.testing.assert_allclose(params["hidden"]["kernel"][i], module.hidden.kernel, rtol=1e-6)
        np.testing.assert_allclose(
            network.apply(particle(params, i), INPUTS), module(INPUTS), rtol=1e-5, atol=1e-6
        )


def test_linen_particles_are_what_init_makes_of_their_keys():
    key = jax.random.key(3)
    params = jsvgd.flax.init_particles(key, LINEN, 4, INPUTS)
    network = jsvgd.flax.functional(LINEN, INPUTS)
    for i, own_key in enumerate(jax.random.split(key, 4)):
        variables = LINEN.init(own_key, INPUTS)
        jax.tree.map(
            lambda got, expected: np.testing.assert_allclose(got, expected, rtol=1e-6),
            particle(params, i),
            variables["params"],
        )
        np.testing.assert_allclose(
            network.apply(particle(params, i), INPUTS),
            LINEN.apply(variables, INPUTS),
            rtol=1e-5,
            atol=1e-6,
        )


@pytest.mark.parametrize(("module", "inputs"), [(NNX, ()), (LINEN, (INPUTS,))])
def test_no_two_particles_and_no_two_keys_agree(module, inputs):
    first = jsvgd.flax.init_particles(jax.random.key(0), module, 30, *inputs)
    second = jsvgd.flax.init_particles(jax.random.key(1), module, 30, *inputs)
    kernels = [leaf for tree in (first, second) for leaf in jax.tree.leaves(tree) if leaf.ndim == 3]
    for kernel in kernels:
        assert len(np.unique(np.asarray(kernel).reshape(30, -1), axis=0)) == 30
    assert not np.any(np.asarray(kernels[0]) == np.asarray(kernels[len(kernels) // 2]))


def test_rngs_may_be_positional():
    params = jsvgd.flax.init_particles(
        jax.random.key(0), lambda streams: NNXNetwork(2, rngs=streams), 3
    )
    assert params["hidden"]["kernel"].shape == (3, 3, 2)


class Stateful(nnx.Module):
    def __init__(self, kind, *, rngs):
        self.first = nnx.Linear(3, 3, rngs=rngs)
        self.extra = kind(rngs=rngs)

    def __call__(self, x):
        return self.extra(self.first(x))


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (
            functools.partial(Stateful, functools.partial(nnx.BatchNorm, 3)),
            ValueError,
            r"extra\.mean \(BatchStat\)",
        ),
        (
            functools.partial(Stateful, functools.partial(nnx.Dropout, 0.5)),
            ValueError,
            r"extra\.rngs.*RngKey",
        ),
        (LinenNetwork(5, normalised=True), ValueError, "collection 'batch_stats'"),
        (LinenNetwork(5, dropout=0.5), ValueError, "draws random numbers"),
        (NNXNetwork(5, rngs=nnx.Rngs(0)), TypeError, "constructor.*instance of NNXNetwork"),
        (LinenNetwork, TypeError, "module must be"),
        (3, TypeError, "module must be"),
        (lambda rngs: None, TypeError, "must construct an nnx.Module, got NoneType"),
    ],
)
def test_what_cannot_be_particles_is_refused(module, error, message):
    with pytest.raises(error, match=message):
        jsvgd.flax.init_particles(jax.random.key(0), module, 2, INPUTS)


def test_sizes_and_missing_inputs_are_refused():
    with pytest.raises(TypeError, match=r"n must be a whole number, got 1\.5"):
        jsvgd.flax.init_particles(jax.random.key(0), NNX, 1.5)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        jsvgd.flax.init_particles(jax.random.key(0), NNX, 0)
    with pytest.raises(ValueError, match="example_inputs must be given"):
        jsvgd.flax.init_particles(jax.random.key(0), LINEN, 2)


# --- log posterior ----------------------------------------------------------------------------------


def linear(params, x):
    return x @ params["w"] + params["b"]


def log_gamma_log_density(log_value):
    """SciPy's Gamma(1, rate 0.1) at exp(log_value), times the Jacobian exp(log_value)."""
    return scipy.stats.gamma.logpdf(np.exp(log_value), a=1.0, scale=10.0) + log_value


def test_log_posterior_is_scipys(x64):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(7, 3)), rng.normal(size=7)
    position = Position(
        {"w": rng.normal(size=3), "b": np.array(0.3)}, np.array(1.2), np.array(-0.4)
    )
    logdensity_fn = jsvgd.flax.log_posterior(linear, data_size=21)
    prediction = x @ position.params["w"] + 0.3
    weights = np.append(position.params["w"], 0.3)
    expected = (
        3 * scipy.stats.norm.logpdf(y, prediction, np.exp(-0.6)).sum()
        + scipy.stats.norm.logpdf(weights, 0.0, np.exp(0.2)).sum()
        + log_gamma_log_density(1.2)
        + log_gamma_log_density(-0.4)
    )
    got = logdensity_fn(jax.tree.map(jnp.asarray, position), (x, y))
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_batches_average_to_the_whole_data(x64):
    rng = np.random.default_rng(1)
    x, y = jnp.asarray(rng.normal(size=(12, 3))), jnp.asarray(rng.normal(size=12))
    position = Position({"w": jnp.ones(3), "b": jnp.zeros(())}, jnp.array(0.1), jnp.array(0.2))
    logdensity_fn = jsvgd.flax.log_posterior(linear, data_size=12)
    batches = [logdensity_fn(position, (x[i : i + 4], y[i : i + 4])) for i in (0, 4, 8)]
    np.testing.assert_allclose(np.mean(batches), logdensity_fn(position, (x, y)), rtol=1e-12)


@pytest.mark.parametrize("shape", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("rate", [0.1, 2.0])
def test_hyperpriors_are_densities_of_the_log_precision(x64, shape, rate):
    grid = jnp.linspace(-60.0, 12.0, 200_001)
    likelihood = jsvgd.flax.gaussian_likelihood(shape, rate)
    density = jnp.exp(jax.vmap(likelihood.log_prior)(grid))
    np.testing.assert_allclose(jnp.trapezoid(density, grid), 1.0, atol=1e-9)
    draws = jax.vmap(likelihood.init)(jax.random.split(jax.random.key(0), 20_000))
    cumulative = scipy.stats.gamma(a=shape, scale=1 / rate).cdf
    assert scipy.stats.kstest(np.exp(draws), cumulative).pvalue > 1e-3


def test_normal_prior_integrates_to_one(x64):
    prior = jsvgd.flax.normal_prior()
    w, log_precision = jnp.linspace(-80.0, 80.0, 4001), jnp.linspace(-6.0, 6.0, 601)
    log_density = jax.vmap(lambda p: jax.vmap(lambda v: prior.log_density(p, {"w": v[None]}))(w))(
        log_precision
    )
    over_w = jnp.trapezoid(jnp.exp(log_density), w, axis=1)
    expected = [np.exp(log_gamma_log_density(p)) for p in log_precision]
    np.testing.assert_allclose(over_w[300:], expected[300:], rtol=1e-6)


def test_a_trailing_axis_of_one_never_broadcasts():
    position = Position({"w": jnp.ones((3, 1)), "b": jnp.zeros(1)}, jnp.array(0.0), jnp.array(0.0))
    flat = position._replace(params={"w": jnp.ones(3), "b": jnp.zeros(())})
    logdensity_fn = jsvgd.flax.log_posterior(linear, data_size=4)
    y = jnp.arange(4.0)
    column = logdensity_fn(position, (INPUTS, y))
    np.testing.assert_allclose(column, logdensity_fn(flat, (INPUTS, y)), rtol=1e-6)
    np.testing.assert_allclose(column, logdensity_fn(position, (INPUTS, y[:, None])), rtol=1e-6)
    with pytest.raises(ValueError, match=r"targets must have the shape.*\(4,\), got \(3,\)"):
        logdensity_fn(position, (INPUTS, y[:3]))
    with pytest.raises(ValueError, match="batch must hold at least one row"):
        logdensity_fn(position, (INPUTS[:0], y[:0]))


def test_bad_arguments_are_named():
    for value in (1.5, "all", None):
        message = f"data_size must be a whole number, got {value!r}"
        with pytest.raises(TypeError, match=message):
            jsvgd.flax.log_posterior(linear, data_size=value)
    with pytest.raises(TypeError, match="apply must be a function .*got NoneType"):
        jsvgd.flax.log_posterior(None, data_size=3)
    for name, kind in [("likelihood", "Likelihood"), ("prior", "Prior")]:
        message = rf"{name} must be a jsvgd\.flax\.{kind}, .*got 'gaussian'"
        with pytest.raises(TypeError, match=message):
            jsvgd.flax.log_posterior(linear, data_size=3, **{name: "gaussian"})
        with pytest.raises(TypeError, match=message):
            jsvgd.flax.init_positions(
                jax.random.key(0), {"w": np.ones((2, 3))}, **{name: "gaussian"}
            )
    with pytest.raises(ValueError, match="data_size must be at least 1, got 0"):
        jsvgd.flax.log_posterior(linear, data_size=0)
    with pytest.raises(ValueError, match=r"rate must be positive, got -1\.0"):
        jsvgd.flax.gaussian_likelihood(rate=-1.0)
    with pytest.raises(ValueError, match="shape must be positive"):
        jsvgd.flax.normal_prior(shape=float("nan"))
    with pytest.raises(ValueError, match="params must have one leading particle axis"):
        jsvgd.flax.init_positions(jax.random.key(0), {"w": jnp.ones((3, 2)), "b": jnp.ones(2)})


def test_positions_draw_every_precision_on_its_own():
    params = jsvgd.flax.init_particles(jax.random.key(0), NNX, 6)
    particles = jsvgd.flax.init_positions(jax.random.key(1), params)
    values = np.concatenate([particles.likelihood, particles.prior])
    assert values.shape == (12,) and len(np.unique(values)) == 12
    assert particles.params is params


# --- predictive -------------------------------------------------------------------------------------

PARTICLES = Position(
    {
        "w": jnp.array([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [1.0, 1.0, 1.0]]),
        "b": jnp.array([0.0, 1, 2]),
    },
    jnp.array([0.0, 1.0, 2.0]),
    jnp.zeros(3),
)
UNITS = {"target_mean": 10.0, "target_scale": 4.0}


def mixture(inputs):
    means = 10 + 4 * np.array([linear(particle(PARTICLES.params, i), inputs) for i in range(3)])
    return means, 4 * np.exp(-0.5 * np.arange(3.0))[:, None]


def test_prediction_is_the_mixtures():
    prediction = jsvgd.flax.predict(linear, PARTICLES, INPUTS, **UNITS)
    means, sds = mixture(INPUTS)
    second_moment = np.mean(means**2 + sds**2, axis=0)
    np.testing.assert_allclose(prediction.mean, means.mean(0), rtol=1e-6)
    np.testing.assert_allclose(prediction.sd**2, second_moment - means.mean(0) ** 2, rtol=1e-5)
    np.testing.assert_allclose(prediction.epistemic_sd, means.std(0), rtol=1e-5)
    np.testing.assert_allclose(
        prediction.aleatoric_sd, np.full(4, np.sqrt(np.mean(sds**2))), rtol=1e-6
    )


def test_log_predictive_density_is_the_log_of_the_averaged_density():
    targets = np.array([9.0, 12.0, 30.0, -5.0])
    got = jsvgd.flax.log_predictive_density(linear, PARTICLES, INPUTS, targets, **UNITS)
    means, sds = mixture(INPUTS)
    expected = np.log(np.mean(scipy.stats.norm.pdf(targets, means, sds), axis=0))
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    far = jsvgd.flax.log_predictive_density(linear, PARTICLES, INPUTS, targets + 1e4, **UNITS)
    assert np.all(np.isfinite(far))


def test_several_outputs_with_their_own_scales():
    def two(params, x):
        return jnp.stack([linear(params, x), -linear(params, x)], axis=-1)

    scale = np.array([2.0, 5.0])
    targets = np.ones((4, 2))
    got = jsvgd.flax.log_predictive_density(two, PARTICLES, INPUTS, targets, target_scale=scale)
    total = np.zeros(4)
    for i in range(3):
        means = np.asarray(two(particle(PARTICLES.params, i), INPUTS)) * scale
        total += scipy.stats.norm.pdf(targets, means, scale * np.exp(-0.5 * i)).prod(axis=1)
    np.testing.assert_allclose(got, np.log(total / 3), rtol=1e-5)
    prediction = jsvgd.flax.predict(two, PARTICLES, INPUTS, target_scale=scale)
    assert prediction.mean.shape == prediction.sd.shape == (4, 2)


# --- all together -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "inputs"), [(NNX, ()), (LINEN, (INPUTS,))])
def test_svgd_learns_a_line(module, inputs):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3)).astype(np.float32)
    y = x[:, 0] + 0.1 * rng.normal(size=200).astype(np.float32)
    network = jsvgd.flax.functional(module, *inputs)
    params = jsvgd.flax.init_particles(jax.random.key(0), network, 5)
    particles = jsvgd.flax.init_positions(jax.random.key(1), params)
    sampler = jsvgd.svgd(jsvgd.flax.log_posterior(network.apply, data_size=200), optax.adam(3e-2))
    state = sampler.init(particles)
    state, _ = jsvgd.run(jax.random.key(2), sampler, state, 300, data=(x, y), batch_size=50)
    prediction = jsvgd.flax.predict(network.apply, state.particles, x)
    assert np.sqrt(np.mean((prediction.mean - y) ** 2)) < 0.25


def test_import_jsvgd_does_not_import_flax():
    code = "import sys, jsvgd; sys.exit('flax' in sys.modules or 'tqdm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_position_of_another_model_is_refused():
    x, y = np.ones((4, 3), np.float32), np.ones(4, np.float32)
    priors = {
        "normal": jsvgd.flax.normal_prior(),
        "fixed": jsvgd.flax.fixed_normal_prior(),
        "horseshoe": jsvgd.flax.horseshoe_prior(),
        "layers": jsvgd.flax.per_layer_prior(jsvgd.flax.normal_prior(), "leaf"),
    }
    params = {"w": np.ones((2, 3), np.float32), "b": np.zeros(2, np.float32)}
    densities, positions = {}, {}
    for name, prior in priors.items():
        densities[name] = jsvgd.flax.log_posterior(linear, data_size=4, prior=prior)
        both = jsvgd.flax.init_positions(jax.random.key(0), params, prior=prior)
        positions[name] = jax.tree.map(lambda a: a[0], both)
    for name, density in densities.items():
        for other, position in positions.items():
            if name == other:
                assert np.isfinite(jax.jit(density)(position, (x, y)))
            else:
                with pytest.raises(ValueError, match="position is of another prior"):
                    density(position, (x, y))
    known = jsvgd.flax.log_posterior(
        linear, data_size=4, likelihood=jsvgd.flax.fixed_gaussian_likelihood(1.0)
    )
    with pytest.raises(ValueError, match="another likelihood .* must be none, got {'a number'"):
        known(positions["normal"], (x, y))
    with pytest.raises(TypeError, match=r"position must be a jsvgd\.flax\.Position, got dict"):
        known(params, (x, y))
    few = jsvgd.flax.log_posterior(linear, data_size=3)
    with pytest.raises(ValueError, match="rows of the whole training set, got 3 and a batch of 4"):
        few(positions["normal"], (x, y))
