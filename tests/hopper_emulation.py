"""Enough of Pallas Mosaic GPU in NumPy to run the bodies of the Hopper kernels on a CPU.

Pallas's own GPU interpreter cannot run a wgmma whose first operand lies in registers. This one runs a
block at a time and a warpgroup at a time, and is strict where the hardware would hang or read garbage:
shared memory and outputs start as NaN, and in every step each barrier of a copy is waited for exactly
once before its tile is read, and each tile is handed back exactly once. It cannot see races between
warpgroups, and it accumulates exactly.
"""

import itertools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
from jax import lax


def index(key):
    key = key if isinstance(key, tuple) else (key,)
    return tuple(k if isinstance(k, slice) or k is Ellipsis else int(k) for k in key)


class Ref:
    """A view of a NumPy array with Pallas's indexing; ``guard`` runs before every read."""

    def __init__(self, array, guard=lambda: None):
        self.array, self.guard = array, guard
        self.shape, self.dtype = array.shape, array.dtype

    @property
    def at(self):
        return SimpleNamespaceGetter(lambda key: Ref(self.array[index(key)], self.guard))

    def __getitem__(self, key):
        self.guard()
        return jnp.asarray(self.array[index(key)])

    def __setitem__(self, key, value):
        target = self.array[index(key)]
        assert np.shape(value) == target.shape, (np.shape(value), target.shape)
        target[...] = np.asarray(value)

    def transpose(self, axes):
        return Ref(self.array.transpose(axes), self.guard)


class SimpleNamespaceGetter:
    def __init__(self, get):
        self.get = get

    def __getitem__(self, key):
        return self.get(key)


class Barrier:
    """Counts waits and arrivals of one step."""

    def __init__(self):
        self.waits = self.arrivals = 0

    @property
    def at(self):
        return SimpleNamespaceGetter(lambda key: self)


def read(x):
    return np.asarray(x[...] if isinstance(x, Ref) else x).astype(np.float64)


def wgmma(ref, a, b):
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    assert a.dtype in (jnp.bfloat16, jnp.float16)
    assert a.shape[0] % 64 == 0
    assert a.shape[1] == b.shape[0]
    ref.array += (read(a) @ read(b)).astype(np.float32)


def pipeline_of(step, *, grid, compute_context, in_specs, **_):
    def pipeline(*sources):
        assert len(sources) == len(in_specs)

        def loop(carry):
            for i in range(grid[0]):
                ready, done = [Barrier() for _ in in_specs], [Barrier() for _ in in_specs]
                tiles = []
                for spec, source, r, d in zip(in_specs, sources, ready, done, strict=True):
                    corner = [
                        int(k) * size
                        for k, size in zip(spec.index_map(i), spec.block_shape, strict=True)
                    ]
                    cut = tuple(
                        slice(k, k + size) for k, size in zip(corner, spec.block_shape, strict=True)
                    )
                    tile = source.array[cut]
                    assert tile.shape == spec.block_shape, "a copy beyond the array"

                    def guard(r=r, d=d):
                        assert r.waits == 1, "a tile read before its copy was waited for"
                        assert d.arrivals == 0, "a tile read after it was handed back"

                    tiles.append(Ref(tile, guard))
                carry = step((i,), *tiles, *ready, *done, carry)
                assert all(b.waits == 1 for b in ready)
                assert all(b.arrivals == 1 for b in done)
            return carry

        compute_context(loop)

    return pipeline


def emulate(monkeypatch, *modules):
    """Let the kernels of these modules run on NumPy. Call their ``launch`` outside of any tracing."""
    place = {}

    def arrive(barrier):
        barrier.arrivals += 1

    def wait(barrier):
        barrier.waits += 1

    def copy(source, target, barrier):
        target.array[...] = source.array

    def scratch(spec):
        if spec.kind == "barrier":
            return Barrier()
        return Ref(np.full(spec.shape, np.nan, spec.dtype))

    def kernel(body, *, out_type, scratch_types, grid, grid_names, num_threads, **_):
        def run(*arrays):
            ins = [Ref(np.asarray(x)) for x in arrays]
            outs = [Ref(np.full(o.shape, np.nan, o.dtype)) for o in out_type]
            for block in itertools.product(*map(range, grid)):
                for wg in range(num_threads - 1):
                    place.update(zip(grid_names, block, strict=True), wg=wg)
                    body(*ins, *outs, *map(scratch, scratch_types))
            for out in outs:
                assert not np.isnan(out.array).any(), "an element was not written"
            return [jnp.asarray(out.array) for out in outs]

        return run

    def run_scoped(f, *specs):
        return f(*[Ref(np.zeros(spec.shape, spec.dtype)) for spec in specs])

    def run_state(f):
        def run(initial):
            refs = [Ref(np.array(start)) for start in initial]
            f(refs)
            return tuple(jnp.asarray(ref.array) for ref in refs)

        return run

    def memory(shape, dtype=jnp.float32, transforms=()):
        return SimpleNamespace(kind="memory", shape=shape, dtype=dtype)

    class Accumulator(SimpleNamespace):
        """Zeros of a shape for run_scoped; run_state takes what they begin with."""

        def __init__(self, shape, dtype):
            super().__init__(shape=shape, dtype=dtype)

        init = staticmethod(lambda array: array)

    layout = SimpleNamespace(reduce=lambda axis: None)
    plgpu = SimpleNamespace(
        ACC=Accumulator,
        SMEM=memory,
        Barrier=lambda num_barriers: SimpleNamespace(kind="barrier"),
        BlockSpec=lambda block_shape, index_map, transforms=(): SimpleNamespace(
            block_shape=block_shape, index_map=index_map
        ),
        CompilerParams=dict,
        Layout=SimpleNamespace(WGMMA=layout),
        SwizzleTransform=lambda n: None,
        TilingTransform=lambda n: None,
        barrier_arrive=arrive,
        barrier_wait=wait,
        commit_smem=lambda: None,
        copy_gmem_to_smem=copy,
        emit_pipeline_warp_specialized=pipeline_of,
        kernel=kernel,
        layout_cast=lambda x, layout: x,
        load=lambda ref, layout, optimized=True: ref[...],
        wgmma=wgmma,
    )
    pl = SimpleNamespace(
        ds=lambda k, size: slice(int(k), int(k) + size),
        run_scoped=run_scoped,
        run_state=run_state,
    )
    placed_lax = SimpleNamespace(
        axis_index=place.__getitem__,
        broadcast_in_dim=lax.broadcast_in_dim,
        cond=lambda condition, yes, no, *operands: (yes if condition else no)(*operands),
        rem=lax.rem,
    )
    for module in modules:
        monkeypatch.setattr(module, "pallas_modules", lambda: (pl, plgpu))
        monkeypatch.setattr(module, "lax", placed_lax)
