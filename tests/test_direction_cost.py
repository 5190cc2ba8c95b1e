"""What the direction may keep, how much it may hold, and the precision of its products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsvgd
from tests.problems import (
    draw,
)


def test_the_backward_pass_stores_the_inputs_alone():
    n, d = 4096, 3
    x, s = draw(n, d)

    def stored(implementation):
        function = functools.partial(jsvgd.svgd_direction, implementation=implementation)
        _, vjp = jax.vjp(function, x, s, np.float32(1.0))
        return sum(a.size for a in jax.tree.leaves(vjp))

    assert stored(None) <= 2 * n * d + 16
    assert stored("dense") > n * n  # the measure does see an N x N residual


@pytest.mark.parametrize(
    ("implementation", "work"),
    [
        *((None, work) for work in ("direction", "gradient", "queries", "second order")),
        *(("xla", work) for work in ("direction", "gradient", "queries")),
    ],
)
def test_memory_does_not_grow_with_the_square(implementation, work):
    n, d = 6000, 3
    x, s = draw(n, d)

    def value(x, s):
        queries = s if work == "queries" else None
        options = {"queries": queries, "implementation": implementation}
        return jnp.sum(jsvgd.svgd_direction(x, s, 1.0, **options) ** 2)

    gradient = jax.grad(value)
    function = {
        "direction": value,
        "second order": jax.grad(lambda x, s: jnp.sum(gradient(x, s) ** 2)),
    }.get(work, gradient)
    analysis = jax.jit(function).lower(x, s).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < n * n * 4 / 2


@pytest.mark.parametrize("precision", ["highest", "high", "default"])
def test_every_product_states_its_precision(precision):
    x, s = draw(33, 5)
    expected = jax.lax.Precision.DEFAULT if precision == "default" else jax.lax.Precision.HIGHEST

    def value(x):
        return jnp.sum(jsvgd.svgd_direction(x, s, 1.0, precision=precision, implementation="xla"))

    products = list(_equations(jax.make_jaxpr(jax.value_and_grad(value))(x).jaxpr, "dot_general"))
    assert len(products) >= 4
    assert {p.params["precision"] for p in products} == {(expected, expected)}


def _equations(jaxpr, name):
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            yield equation
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from _equations(inner, name)
