"""One kernel a layer: groups of leaves."""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jsvgd
import jsvgd.flax
from tests.networks import INPUTS, PARAMS, LinenNetwork
from tests.problems import oracle, relative_error


def particle_tree(n=21):
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda a: rng.normal(size=(n, *a.shape)).astype(np.float32), {"params": PARAMS}
    )


def matrix(tree):
    return np.concatenate([np.reshape(a, (len(a), -1)) for a in jax.tree.leaves(tree)], axis=1)


def test_kernels_a_layer_are_the_direction_of_each_layer_alone():
    particles = particle_tree()
    transform = jsvgd.scale_by_svgd_per_group("layer", bandwidth="no_log")
    updates, state = transform.update(particles, transform.init(particles), particles)
    assert jax.tree.structure(updates) == jax.tree.structure(particles)
    for name in ("hidden", "output"):
        x = matrix(particles["params"][name])
        h = jsvgd.median_bandwidth(x, rule="no_log")
        np.testing.assert_allclose(state.bandwidth[f"params.{name}"], h, rtol=1e-6)
        assert relative_error(matrix(updates["params"][name]), -oracle(x, -x, h)) < 2e-5
    assert int(state.count) == 1


def test_groups_by_leaf_by_function_and_of_one():
    particles = particle_tree()
    by_leaf = jsvgd.scale_by_svgd_per_group("leaf").init(particles)
    assert sorted(by_leaf.groups) == [
        "params.hidden.bias",
        "params.hidden.kernel",
        "params.output.kernel",
    ]
    together = jsvgd.scale_by_svgd_per_group(lambda path: "all", bandwidth=2.0)
    one, _ = together.update(particles, together.init(particles), particles)
    plain = jsvgd.scale_by_svgd(bandwidth=2.0)
    expected, _ = plain.update(particles, plain.init(particles), particles)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), one, expected)
    ends = jsvgd.scale_by_svgd_per_group(lambda path: path[-1]).init(particles)
    assert sorted(ends.groups) == ["bias", "kernel"]


def test_the_layers_of_nnx_and_linen_networks_are_found():
    nnx_params = jsvgd.flax.init_particles(
        jax.random.key(0), lambda rngs: nnx.List([nnx.Linear(2, 3, rngs=rngs)] * 1), 4
    )
    linen_params = jsvgd.flax.init_particles(jax.random.key(0), LinenNetwork(), 4, INPUTS)
    nnx_groups = jsvgd.scale_by_svgd_per_group().init(nnx_params).groups
    linen_groups = jsvgd.scale_by_svgd_per_group().init(linen_params).groups
    assert list(nnx_groups) == ["0"]
    assert sorted(linen_groups) == ["Dense_0", "Dense_1"]


def test_leaves_called_value_are_leaves():
    class Pair(typing.NamedTuple):
        value: jax.Array
        scale: jax.Array

    leaf = np.ones((4, 2), np.float32)
    found = lambda tree, how: list(jsvgd.scale_by_svgd_per_group(how).init(tree).groups)
    assert found({"a": {"value": leaf, "b": leaf}}, "layer") == ["a"]
    assert found({"a": {"value": leaf, "b": leaf}}, "leaf") == ["a.b", "a.value"]
    assert sorted(found(Pair(leaf, leaf), "leaf")) == ["scale", "value"]
    assert found({"in": Pair(leaf, leaf), "out": leaf}, "layer") == ["in", ""]
    params = jsvgd.flax.init_particles(
        jax.random.key(0), lambda rngs: nnx.Linear(2, 3, rngs=rngs), 4
    )
    assert found(params, "leaf") == ["bias", "kernel"]


def test_groups_that_cannot_be_are_named():
    leaf = np.ones((4, 2), np.float32)
    with pytest.raises(ValueError, match=r"leaves at a/b and at a\.b would both be called 'a\.b'"):
        jsvgd.scale_by_svgd_per_group("leaf").init({"a": {"b": leaf}, "a.b": leaf})
    with pytest.raises(ValueError, match=r"layers at a/b and at a\.b would both be called 'a\.b'"):
        jsvgd.scale_by_svgd_per_group().init({"a": {"b": {"w": leaf}}, "a.b": {"w": leaf}})
    with pytest.raises(ValueError, match="groups must be .* got 'block'"):
        jsvgd.scale_by_svgd_per_group("block")
    with pytest.raises(TypeError, match="groups must be .* got int"):
        jsvgd.scale_by_svgd_per_group(3)
    particles = particle_tree()
    transform = jsvgd.scale_by_svgd_per_group()
    with pytest.raises(ValueError, match="needs the particles"):
        transform.update(particles, transform.init(particles))
    with pytest.raises(ValueError, match="updates must have the structure of params"):
        transform.update({}, transform.init(particles), particles)


def test_in_many_dimensions_a_kernel_a_layer_keeps_more_spread():
    """On N(0, I_80) in layers of 4: the median rule collapses over 80 dimensions, not over 4."""
    particles = {
        f"layer{i}": {"w": np.random.default_rng(i).normal(size=(30, 4)).astype(np.float32)}
        for i in range(20)
    }
    log_density = lambda p: -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))
    variances = {}
    for groups in (None, "layer"):
        sampler = jsvgd.svgd(log_density, optax.sgd(0.3), groups=groups)
        state, history = jsvgd.run(jax.random.key(0), sampler, sampler.init(particles), 300)
        variances[groups] = matrix(state.particles).var(axis=0).mean()
        assert int(history.info.num_nonfinite[-1]) == 0
    assert variances[None] < 0.25
    assert variances["layer"] > 0.6
