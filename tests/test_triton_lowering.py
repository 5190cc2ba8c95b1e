"""The portable kernels lowered for CUDA on a machine without a GPU: names, and the precision of every dot."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import (
    triton_apart,
    triton_backward,
    triton_forward,
    triton_gram,
    triton_small,
)

HAS_ABSTRACT_DEVICE = hasattr(jax.sharding, "AbstractDevice") and jax.__version_info__ >= (0, 11)
pytestmark = pytest.mark.skipif(
    not HAS_ABSTRACT_DEVICE, reason="lowering for CUDA without a GPU needs JAX >= 0.11"
)

FORWARD_DOTS = {"rbf": 2, "imq": 3}
BACKWARD_DOTS = {"rbf": 5, "imq": 8}


def lowered(f, *shapes):
    """Text of f lowered for an H200."""
    device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "cuda")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def shapes(n, d, batch=()):
    z = jax.ShapeDtypeStruct((*batch, n, d), jnp.float32)
    return z, z, z, jax.ShapeDtypeStruct((d,), jnp.float32), z


def forward(**options):
    return lambda zq, zk, s, c, g: triton_forward.forward(zq, zk, s, c, **options)


def backward(**options):
    return lambda zq, zk, s, c, g: triton_backward.backward(zk, s, c, g, **options)


def dots_and_kernels(f, *args):
    """Every dot of every Pallas kernel in f's jaxpr as (operand dtype, precision), and the kernels' names."""
    dots, names = [], []

    def visit(jaxpr, inside):
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name == "pallas_call":
                names.append(
                    str(equation.params.get("name") or equation.params["jaxpr"].debug_info)
                )
            if name == "dot_general" and inside:
                types = {str(v.aval.dtype) for v in equation.invars}
                assert len(types) == 1
                precision = equation.params["precision"]
                dots.append((types.pop(), precision))
            for value in equation.params.values():
                for sub in value if isinstance(value, (tuple, list)) else (value,):
                    inner = getattr(sub, "jaxpr", sub)
                    if hasattr(inner, "eqns"):
                        visit(inner, inside or name == "pallas_call")

    visit(jax.make_jaxpr(f)(*args).jaxpr, False)
    return dots, names


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
@pytest.mark.parametrize("precision", ["highest", "high", "default"])
@pytest.mark.parametrize(
    ("build", "count", "name"),
    [(forward, FORWARD_DOTS, "svgd_forward_dot"), (backward, BACKWARD_DOTS, "svgd_backward_dot")],
    ids=["forward", "backward"],
)
def test_every_dot_has_the_precision_asked_for(kernel, precision, build, count, name):
    f = build(kernel=kernel, precision=precision, family="dot")
    dots, names = dots_and_kernels(f, *shapes(200, 20))
    assert [f"{name}_{kernel}" in x for x in names] == [True]
    if precision == "highest":  # float32 operands, and IEEE products asked for by name
        highest = (jax.lax.Precision.HIGHEST,) * 2
        assert dots == [("float32", highest)] * count[kernel]
    else:  # 16-bit operands are exact in one product: one for "default", three for "high"
        found = collections.Counter(x for x, _ in dots)
        times = 3 if precision == "high" else 1
        assert found == {"float16": times, "bfloat16": times * (count[kernel] - 1)}
    assert f"{name}_{kernel}" in lowered(f, *shapes(200, 20))


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
@pytest.mark.parametrize("d", [1, 2, 4, 7, 16])
def test_direct_kernels_lower_without_a_dot(kernel, d):
    for build, name in [(forward, "svgd_forward_direct"), (backward, "svgd_backward_direct")]:
        f = build(kernel=kernel, precision="high", family="direct")
        dots, names = dots_and_kernels(f, *shapes(300, d))
        assert dots == []
        assert len(names) == 1
        assert f"{name}_{kernel}" in lowered(f, *shapes(300, d))


@pytest.mark.parametrize("d", [2, 20, 100, 128, 200, 256])
@pytest.mark.parametrize("n", [50, 1024, 20000])
def test_table_choices_lower(n, d):
    for build, limit in [(forward, 256), (backward, 128)]:
        if d <= limit:
            text = lowered(build(kernel="rbf", precision="high"), *shapes(n, d))
            assert text.count("xla.gpu.triton") == 1


def test_update_and_vmap_lower_to_one_kernel():
    def update(zq, zk, s, c, g):
        return triton_forward.forward(
            zq, zk, s, c, base=zq, scale=jnp.float32(0.1), kernel="rbf", precision="high"
        )

    chains = jax.vmap(update, in_axes=(0, 0, 0, None, 0))
    text = lowered(chains, *shapes(256, 32, (64,)))
    assert text.count("xla.gpu.triton") == 1
    assert "svgd_forward_dot_rbf" in text
    pull = jax.vmap(
        functools.partial(triton_backward.backward, kernel="rbf", precision="high"),
        in_axes=(0, 0, None, 0),
    )
    z, _, s, c, g = shapes(256, 3, (64,))
    assert lowered(pull, z, s, c, g).count("xla.gpu.triton") == 1


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
@pytest.mark.parametrize("d", [7, 50, 256])
def test_differences_behind_a_flag_lower(kernel, d):
    z, *_, c, g = shapes(1000, d)

    def forward(x, c):
        return triton_apart.forward(x, x[0, 0] > 0, x, x, x, c, c, kernel=kernel)

    def backward(x, c):
        return triton_apart.backward((x,) * 4, x[0, 0] > 0, x, x, c, c, x, kernel=kernel)

    assert f"svgd_apart_forward_{kernel}" in lowered(forward, z, c)
    assert f"svgd_apart_backward_{kernel}" in lowered(backward, g, c)


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
@pytest.mark.parametrize("n", [20, 1000])
def test_few_particles_in_many_dimensions_lower(kernel, n):
    z, *_, c, _ = shapes(n, 1001)
    options = {"kernel": kernel, "precision": "high"}

    def direction(x, c):
        gram = triton_gram.gram(x, x[0], c, precision="high")
        gram = triton_apart.half_squared_distances(gram, x[0, 0] > 0, x, c)
        phi = triton_gram.combine(gram, gram, x, x, x[0], c, c, **options)
        return triton_apart.combine(phi, x[0, 0] > 0, gram, gram, x, x, c, c)

    text = lowered(direction, z, c)
    names = ["svgd_gram", "svgd_apart_distances", f"svgd_combine_{kernel}", "svgd_apart_combine"]
    assert [name for name in names if name not in text] == []


@pytest.mark.parametrize("kernel", ["rbf", "imq"])
@pytest.mark.parametrize("precision", ["highest", "high", "default"])
def test_few_particles_lower_and_state_their_precision(kernel, precision):
    z, *_, c, _ = shapes(300, 50, (3,))

    def direction(x, c):
        options = {"kernel": kernel, "precision": precision, "limit": 1000.0}
        return jax.vmap(lambda x: triton_small.forward(x, x, x, c, c, **options))(x)

    text = lowered(direction, z, c)
    assert f"svgd_small_{kernel}" in text and f"svgd_apart_assemble_{kernel}" in text
    dots, _ = dots_and_kernels(direction, jnp.zeros(z.shape), jnp.ones(c.shape))
    parts = {"highest": 1, "high": 3, "default": 1}[precision]
    assert len(dots) == FORWARD_DOTS[kernel] * parts
    wanted = jax.lax.Precision.HIGHEST if precision == "highest" else jax.lax.Precision.DEFAULT
    assert {p for _, p in dots} == {(wanted, wanted)}
    # The exponent in float16 parts, the sum in parts that one pass of TF32 keeps whole.
    types = {
        "highest": {"float32"},
        "high": {"float16", "float32"},
        "default": {"float16", "bfloat16"},
    }
    assert {t for t, _ in dots} == types[precision]
