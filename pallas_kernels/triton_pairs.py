"""The mathematics of one tile of pairs, shared by the portable forward and backward kernels.

For standardised particles z = (x - centre)/sqrt(h) a pair has D = |z_i - z_j|^2 and u = D/2. A kernel
k = f(u) enters the direction through f and its slope w = -f', and the gradient also through f'':

    rbf   f = w = f'' = exp(-u)
    imq   f = t^(-1/2), w = t^(-3/2), f'' = 3 t^(-5/2), with t = 1 + 2u

Products on the matrix units take float32 operands as one or two parts of 16 bits ("default": the value
rounded once; "high": high and low parts, three products, the product of the two low parts dropped) or whole
("highest": IEEE float32 products). Particles are split in float16, whose 11 bits a part give 22 bits over the
range that centred and scaled particles occupy; everything else in bfloat16, which has float32's range.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

LOG2E = math.log2(math.e)
FAR = (
    1e15  # coordinate of a padded particle: D = 1e30 is finite, and every kernel weight underflows
)
FAR_NORM = 1e30  # |z|^2 of a padded particle whose coordinates must stay 0 in the products
MANTISSA = {jnp.float16: (5, 10), jnp.bfloat16: (8, 7)}  # exponent and mantissa bits


def distance_scale(kernel):
    """Factor on D that lets a tile use exp2 for the rbf exponent: exp(-D/2) = exp2(-scale D)."""
    return LOG2E / 2 if kernel == "rbf" else 1.0


def exp2(x, interpret):
    """2^x. On a GPU the one hardware instruction: libdevice adds three more for subnormal results."""
    return jnp.exp2(x) if interpret else _instruction("ex2.approx.ftz.f32", x)


def rsqrt(x, interpret):
    """x^(-1/2) for x >= 1, one hardware instruction on a GPU."""
    return lax.rsqrt(x) if interpret else _instruction("rsqrt.approx.ftz.f32", x)


def fma(a, b, c, interpret):
    """a b + c, broadcast. XLA compiles Triton kernels without contraction: a sum of products takes twice
    the instructions unless it asks for the fused one."""
    if interpret:
        return a * b + c
    return _instruction("fma.rn.f32", *jnp.broadcast_arrays(a, b, c))


def dot(left, right, interpret, start=None):
    """sum_x left[x] right[x] (+ start) over lists of broadcastable arrays, as a chain of `fma`."""
    total = left[0] * right[0] if start is None else fma(left[0], right[0], start, interpret)
    for a, b in zip(left[1:], right[1:], strict=True):
        total = fma(a, b, total, interpret)
    return total


def opaque(x):
    """x, through an instruction that no compiler sees into."""
    return _instruction("mov.f32", x)


def _instruction(name, *args):
    slots = ", ".join(f"${i}" for i in range(len(args) + 1))
    [y] = plt.elementwise_inline_asm(
        f"{name} {slots};",
        args=args,
        constraints=",".join(["=f"] + ["f"] * len(args)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, args[0].dtype)],
    )
    return y


def profile(kernel, distance, interpret):
    """(f, w, f'') of a tile from its scaled squared distances.

    Args:
      kernel: "rbf" or "imq".
      distance: D >= 0 times `distance_scale`, any shape, float32.
      interpret: whether the Pallas interpreter runs the kernel (it has no inline assembly).
    """
    if kernel == "rbf":
        f = exp2(-distance, interpret)
        return f, f, f
    f = rsqrt(1.0 + distance, interpret)
    square = f * f
    w = square * f
    return f, w, 3.0 * (w * square)


def split(x, dtype, precision):
    """Parts of a float32 array for `product`, formed outside a kernel.

    Args:
      x: float32 array. dtype: jnp.float16 or jnp.bfloat16. precision: "highest", "high" or "default".

    Returns:
      A tuple of one or two arrays of x's shape. The high part comes from lax.reduce_precision: XLA would
      remove a round trip through dtype and leave a low part of zeros.
    """
    if precision == "highest":
        return (x,)
    if precision == "default":
        return (x.astype(dtype),)
    high = lax.reduce_precision(x, *MANTISSA[dtype])
    return high.astype(dtype), (x - high).astype(dtype)


def split_tile(x, precision, dtype=jnp.bfloat16):
    """Parts of a tile inside a kernel; the high part by a bit mask, which is exact.

    dtype: bfloat16 (8 + 8 bits), float16 (10 + 11), or float32 for parts that one pass of TF32 keeps
    whole (10 + 11 bits over float32's range).
    """
    if precision == "highest":
        return (x,)
    if precision == "default":
        return (x.astype(jnp.bfloat16 if dtype == jnp.float32 else dtype),)
    mask = -65536 if dtype == jnp.bfloat16 else -8192
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(mask)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high.astype(dtype), (x - high).astype(dtype)


def product(left, right, contract):
    """Matrix product of two operands given as parts, accumulated in float32, small terms first.

    Args:
      left, right: tuples of one or two tiles. contract: the contracted dimension of each, a pair.
    """
    if len(left) == 1:
        pairs = [(left[0], right[0])]
    else:
        pairs = [(left[1], right[0]), (left[0], right[1]), (left[0], right[0])]
    total = None
    # 16-bit operands have one product; DEFAULT only names it. Whole float32 operands ask for IEEE
    # products, and their parts for one pass of TF32, which is what they were cut for.
    whole = len(pairs) == 1 and left[0].dtype == jnp.float32
    precision = lax.Precision.HIGHEST if whole else lax.Precision.DEFAULT
    for a, b in pairs:
        term = lax.dot_general(
            a,
            b,
            (((contract[0],), (contract[1],)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        total = term if total is None else total + term
    return total


def norms(parts):
    """|x|^2 of every row from the parts that enter `product`, so that a point's distance to itself is 0."""
    x = sum(part.astype(jnp.float32) for part in parts)
    return jnp.sum(x * x, axis=1)


def column_norms(parts, n):
    """`norms` with every row from n on put out of reach."""
    norm = norms(parts)
    size = norm.shape[0]
    return norm if size == n else jnp.where(jnp.arange(size) < n, norm, FAR_NORM)


def distances(q, k, q_norm, k_norm, interpret):
    """Tile of |q_i - k_j|^2, not below 0, from operands in parts and squared norms (bm, 1) and (1, bn)."""
    two = jnp.full((1, 1), -2.0, jnp.float32)
    distance = fma(product(q, k, (1, 1)), two, q_norm + k_norm, interpret)
    return jnp.where(distance < 0.0, 0.0, distance)  # maximum would turn a NaN into 0 on a GPU


def components(x, size, value=0.0):
    """x (n, d) as (d, size), so that a warp reads one component of its columns in one line."""
    return jnp.pad(x.T, [(0, 0), (0, size - x.shape[0])], constant_values=value)


def pad_rows(x, size):
    """x (n,) with zeros appended up to `size`."""
    return jnp.pad(x, (0, size - x.shape[0]))
