"""SVGD in loops that know nothing of it: one line of a Flax example changes, and optax's own wrappers."""

import difflib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jsvgd
from tests.problems import oracle, relative_error

# Two deep ensembles as Flax's documentation trains them: 8 models, one loss, one optimiser. The loss
# is a sum over models and rows, so that each model gets the gradient of its own negative log density.
NNX_LOOP = """
import jax, jax.numpy as jnp, optax, jsvgd
from flax import nnx

class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(1, 16, rngs=rngs)
        self.out = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x)))

@nnx.split_rngs(splits=8)
@nnx.vmap
def create_ensemble(rngs):
    return MLP(rngs)

@nnx.vmap(in_axes=(0, None))
def forward(model, x):
    return model(x)

def loss_fn(models, x, y):
    return 0.5 * jnp.sum((forward(models, x) - y) ** 2) / 0.1**2

@nnx.jit
def train_step(models, optimizer, x, y):
    loss, grads = nnx.value_and_grad(loss_fn)(models, x, y)
    optimizer.update(models, grads)
    return loss

models = create_ensemble(nnx.Rngs(0))
tx = optax.adam(1e-2)
optimizer = nnx.Optimizer(models, tx, wrt=nnx.Param)
for _ in range(num_steps):
    loss = train_step(models, optimizer, x, y)
params = nnx.state(models, nnx.Param)
predictions = forward(models, x_new)
"""

LINEN_LOOP = """
import jax, jax.numpy as jnp, optax, jsvgd
from flax import linen as nn
from flax.training.train_state import TrainState

class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(16)(x)))

model = MLP()

@jax.jit
def train_step(state, x, y):
    def loss_fn(params):
        predictions = jax.vmap(state.apply_fn, in_axes=(0, None))({"params": params}, x)
        return 0.5 * jnp.sum((predictions - y) ** 2) / 0.1**2

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss

params = jax.vmap(model.init, in_axes=(0, None))(jax.random.split(jax.random.key(0), 8), x)["params"]
tx = optax.adam(1e-2)
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
for _ in range(num_steps):
    state, loss = train_step(state, x, y)
params = state.params
predictions = jax.vmap(model.apply, in_axes=(0, None))({"params": params}, x_new)
"""

OLD = "tx = optax.adam(1e-2)"
NEW = "tx = optax.chain(jsvgd.scale_by_svgd(), optax.adam(1e-2))"


def target(x):
    return np.sin(4 * x) + 0.5


def rows():
    x = np.linspace(-1.0, 1.3, 30, dtype=np.float32)[:, None]
    x_new = np.linspace(-1, 1.3, 41, dtype=np.float32)[:, None]
    return {"x": x, "y": target(x), "x_new": x_new}


def trained(source, num_steps):
    names = {**rows(), "num_steps": num_steps}
    exec(compile(source, "loop", "exec"), names)
    return names


def as_matrix(tree):
    return np.concatenate(
        [np.asarray(leaf).reshape(8, -1) for leaf in jax.tree.leaves(tree)], axis=1
    )


@pytest.mark.parametrize("loop", [NNX_LOOP, LINEN_LOOP], ids=["nnx.Optimizer", "TrainState"])
def test_one_line_turns_an_ensemble_into_svgd(loop):
    changed = loop.replace(OLD, NEW)
    differences = difflib.ndiff(loop.split("\n"), changed.split("\n"))
    assert [d for d in differences if d[0] in "+-"] == [f"- {OLD}", f"+ {NEW}"]

    # The first step is Adam's of minus phi, phi from the dense float64 formula.
    start, one = trained(changed, 0), trained(changed, 1)
    x = as_matrix(start["params"])
    gradients = gradients_of(loop, start)
    phi = oracle(x, -gradients, np.float32(jsvgd.median_bandwidth(x)))
    moved = as_matrix(one["params"]) - x
    far_from_zero = np.abs(phi) > 1e-4 * np.abs(phi).max()  # elsewhere rounding decides the sign
    assert far_from_zero.mean() > 0.8
    assert relative_error(moved[far_from_zero], 1e-2 * np.sign(phi)[far_from_zero]) < 1e-3

    ensemble, svgd = trained(loop, 400), trained(changed, 400)
    for names in (ensemble, svgd):
        assert np.isfinite(names["loss"])
    error = np.mean(svgd["predictions"], axis=0) - target(rows()["x_new"])
    assert np.sqrt(np.mean(error**2)) < 0.25
    assert not np.allclose(as_matrix(svgd["params"]), as_matrix(ensemble["params"]), atol=1e-3)


def gradients_of(loop, names):
    """Gradients of each model's own negative log density, without SVGD."""
    if loop is LINEN_LOOP:
        apply = lambda params, x: names["model"].apply({"params": params}, x)
        params = names["params"]
    else:
        from flax import nnx

        graph, params = nnx.split(names["models"])
        apply = lambda params, x: nnx.merge(graph, params)(x)

    def loss(params):
        return 0.5 * jnp.sum((apply(params, names["x"]) - names["y"]) ** 2) / 0.1**2

    return as_matrix(jax.vmap(jax.grad(loss))(params))


# --- optax's wrappers -------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
PARTICLES = {
    "a": RNG.normal(size=(9, 4)).astype(np.float32),
    "b": RNG.normal(size=(9, 3)).astype(np.float32),
}


def phi(x, h=2.0):
    return oracle(x, -x, np.float32(h))


def updates_of(transform, steps=1):
    state = transform.init(PARTICLES)
    update = jax.jit(transform.update)
    for _ in range(steps):
        updates, state = update(PARTICLES, state, PARTICLES)  # of N(0, I): the gradient is x
    return updates


def test_masked_leaves_are_left_alone():
    masked = optax.masked(jsvgd.scale_by_svgd(bandwidth=2.0), {"a": True, "b": False})
    updates = updates_of(masked)
    assert relative_error(updates["a"], -phi(PARTICLES["a"])) < 2e-5
    np.testing.assert_array_equal(updates["b"], PARTICLES["b"])


def test_multi_transform_gives_parts_their_own_svgd():
    transform = optax.multi_transform(
        {
            "wide": jsvgd.scale_by_svgd(bandwidth=5.0),
            "steep": optax.chain(jsvgd.scale_by_svgd(bandwidth=1.0), optax.scale(-0.5)),
        },
        {"a": "wide", "b": "steep"},
    )
    updates = updates_of(transform)
    assert relative_error(updates["a"], -phi(PARTICLES["a"], 5.0)) < 2e-5
    assert relative_error(updates["b"], 0.5 * phi(PARTICLES["b"], 1.0)) < 2e-5


def test_schedules_clipping_and_weight_decay():
    both = np.concatenate([PARTICLES["a"], PARTICLES["b"]], axis=1)
    schedule = optax.piecewise_constant_schedule(0.1, {2: 0.01})
    scheduled = optax.chain(jsvgd.scale_by_svgd(bandwidth=2.0), optax.sgd(schedule))
    for steps, size in [(1, 0.1), (3, 0.001)]:
        updates = updates_of(scheduled, steps)
        moved = np.concatenate([updates["a"], updates["b"]], axis=1)
        assert relative_error(moved, size * phi(both)) < 2e-5
    # Weight decay in front of SVGD is a normal prior: here it doubles the gradient of N(0, I).
    prior = optax.chain(optax.add_decayed_weights(1.0), jsvgd.scale_by_svgd(bandwidth=2.0))
    updates = updates_of(prior)
    moved = np.concatenate([updates["a"], updates["b"]], axis=1)
    assert relative_error(moved, -oracle(both, -2 * both, np.float32(2.0))) < 2e-5
    clipped = optax.chain(
        jsvgd.scale_by_svgd(bandwidth=2.0), optax.clip_by_global_norm(0.01), optax.sgd(1.0)
    )
    np.testing.assert_allclose(
        np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(updates_of(clipped)))),
        0.01,
        rtol=1e-5,
    )


def test_hyperparameters_may_be_injected_and_changed():
    make = optax.inject_hyperparams(
        lambda repulsion, learning_rate: optax.chain(
            jsvgd.scale_by_svgd(bandwidth=2.0, repulsion=repulsion), optax.sgd(learning_rate)
        )
    )
    transform = make(repulsion=1.0, learning_rate=0.1)
    state = transform.init(PARTICLES)
    update = jax.jit(transform.update)
    both = np.concatenate([PARTICLES["a"], PARTICLES["b"]], axis=1)
    for repulsion, rate in [(1.0, 0.1), (0.0, 0.3)]:
        state.hyperparams["repulsion"] = jnp.asarray(repulsion)
        state.hyperparams["learning_rate"] = jnp.asarray(rate)
        updates, state = update(PARTICLES, state, PARTICLES)
        moved = np.concatenate([updates["a"], updates["b"]], axis=1)
        expected = oracle(both, -both, np.float32(2.0), repulsion=repulsion)
        assert relative_error(moved, rate * expected) < 2e-5
    assert update._cache_size() == 1


@pytest.mark.parametrize("preconditioner", ["covariance", "diagonal", np.eye(7, dtype=np.float32)])
def test_every_number_of_svgd_may_be_injected(preconditioner):
    """optax injects the defaults too: refresh_every is then a number that changes in the state."""
    options = {"preconditioner": preconditioner, "bandwidth": 2.0}
    transform = optax.inject_hyperparams(jsvgd.scale_by_svgd)(**options)
    plain = jsvgd.scale_by_svgd(**options)
    moved = jax.tree.map(lambda a: 2 * a, PARTICLES)
    update, plain_update = jax.jit(transform.update), jax.jit(plain.update)
    state, plain_state = transform.init(PARTICLES), plain.init(PARTICLES)
    for particles in (PARTICLES, moved):
        found, state = update(particles, state, particles)
        expected, plain_state = plain_update(particles, plain_state, particles)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
    if isinstance(preconditioner, str):
        before = state.inner_state.factor
        state.hyperparams["refresh_every"] = jnp.asarray(1)  # instead of 5: now due
        _, state = update(moved, state, moved)
        np.testing.assert_allclose(state.inner_state.factor, 2 * before, rtol=1e-4, atol=1e-6)
        assert update._cache_size() == 1


def test_a_kernel_a_group_may_be_injected_too():
    transform = optax.inject_hyperparams(jsvgd.scale_by_svgd_per_group)(
        groups="leaf", bandwidth=2.0, preconditioner="diagonal", refresh_every=3
    )
    plain = jsvgd.scale_by_svgd_per_group("leaf", bandwidth=2.0, preconditioner="diagonal")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        updates_of(transform, 2),
        updates_of(plain, 2),
    )
    by_name = optax.inject_hyperparams(jsvgd.scale_by_svgd_per_group, static_args="groups")
    updates = updates_of(by_name(groups=lambda names: names[0], bandwidth=2.0))
    assert relative_error(updates["a"], -phi(PARTICLES["a"])) < 2e-5


@pytest.mark.parametrize("refresh_every", [1.5, "5", jnp.ones(2)])
def test_refresh_every_is_a_whole_number(refresh_every):
    with pytest.raises(TypeError, match="refresh_every must be a whole number or None, got"):
        jsvgd.scale_by_svgd(preconditioner="covariance", refresh_every=refresh_every)


def test_apply_if_finite_and_multi_steps():
    guarded = optax.apply_if_finite(optax.chain(jsvgd.scale_by_svgd(), optax.sgd(0.1)), 3)
    state = guarded.init(PARTICLES)
    broken = {"a": np.full((9, 4), np.nan, np.float32), "b": PARTICLES["b"]}
    updates, state = guarded.update(broken, state, PARTICLES)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(updates))
    accumulated = optax.MultiSteps(optax.chain(jsvgd.scale_by_svgd(bandwidth=2.0)), 2)
    state = accumulated.init(PARTICLES)
    half = jax.tree.map(lambda a: 0.5 * a, PARTICLES)
    first, state = accumulated.update(half, state, PARTICLES)
    second, state = accumulated.update(jax.tree.map(lambda a: 3 * a, half), state, PARTICLES)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(first))
    both = np.concatenate([PARTICLES["a"], PARTICLES["b"]], axis=1)
    moved = np.concatenate([second["a"], second["b"]], axis=1)
    assert relative_error(moved, -phi(both)) < 2e-5
