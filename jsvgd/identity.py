"""What tells one run from another, as a checkpoint records it: key, first state, data and settings."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["abstract", "described", "differences_of", "identity", "named", "others", "packed"]

# Rows of the data whose digest tells one data set from another.
_ROWS_OF_DIGEST = 1000


def identity(rng_key: jax.Array, state: Any, *, data: Any, batch_size: int | None, every: int):
    """All that has to be the same where a run goes on, as JSON holds it.

    Args:
      rng_key, state: of the run, before its first step.
      data: its arrays; None where there are none or they come from an iterator. Of many rows some
        hundred, evenly spaced, are looked at.
      batch_size, every: of the run.
    """
    parts = state._asdict() if hasattr(state, "_asdict") else {"state": state}
    return {
        "rng_key": _key_description(rng_key),
        "start": int(state.step),
        "digests": {name: _digest(part) for name, part in parts.items()},
        "data": {} if data is None else described(named("data", data)),
        "data_digest": _digest(jax.tree.map(_some_rows, data)),
        "batch_size": batch_size,
        "every": every,
    }


def others(there: dict, here: dict, *, of_other_shapes: bool) -> list[str]:
    """What differs between two identities, in words; states of other shapes differ in numbers too."""
    found = []
    if not of_other_shapes:
        found += [
            f"the run began with other {name.replace('_', ' ')}"
            for name, digest in here["digests"].items()
            if there["digests"].get(name) != digest
        ]
    of_data = differences_of(there["data"], here["data"])
    if not of_data and there["data_digest"] != here["data_digest"]:
        of_data = ["data holds other numbers"]
    found += of_data
    for name in ("rng_key", "batch_size", "every"):
        if there[name] != here[name]:
            found.append(f"{name} is {there[name]} there and {here[name]} here")
    if there["start"] != here["start"]:
        found.append(f"the run began at step {there['start']} there and at {here['start']} here")
    return found


def _digest(tree: Any) -> str:
    """Of the leaves' bytes and places."""
    digest = hashlib.sha256()
    for path, leaf in named("", tree).items():
        array = np.ascontiguousarray(packed(leaf))
        digest.update(f"{path} {array.dtype} {array.shape} ".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def _some_rows(leaf):
    rows = np.shape(leaf)[0]
    return leaf if rows <= _ROWS_OF_DIGEST else leaf[:: -(-rows // _ROWS_OF_DIGEST)]


def named(name: str, tree: Any) -> dict[str, Any]:
    """The leaves by name and path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {name + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def described(leaves: dict[str, Any]) -> dict[str, str]:
    """Dtype and shape of each leaf."""
    return {
        path: f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in ((path, abstract(leaf)) for path, leaf in leaves.items())
    }


def abstract(leaf):
    """The leaf, or the array that it stands for: something with a shape and a dtype."""
    return leaf if hasattr(leaf, "dtype") and hasattr(leaf, "shape") else np.asarray(leaf)


def differences_of(there: dict[str, str], here: dict[str, str], most: int = 5) -> list[str]:
    """Where two descriptions differ, in words."""
    found = [
        f"{path} is {there.get(path, 'absent')} there and {here.get(path, 'absent')} here"
        for path in {**here, **there}
        if there.get(path) != here.get(path)
    ]
    more = len(found) - most
    return [*found[:most], f"and {more} more"] if more > 0 else found


def packed(leaf):
    """The leaf as an array of numbers, random keys as their data."""
    if jnp.issubdtype(abstract(leaf).dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return jnp.asarray(leaf)


def _key_description(rng_key: jax.Array) -> str:
    if jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key):
        return f"{jax.random.key_impl(rng_key)}{np.asarray(jax.random.key_data(rng_key)).tolist()}"
    return str(np.asarray(rng_key).tolist())
