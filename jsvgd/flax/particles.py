"""Particles of a Flax module: its parameters with a leading particle axis, and a pure apply."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax
import jax
from flax import linen, nnx

from jsvgd.arguments import at_least

__all__ = ["Network", "functional", "init_particles", "particles_from_models"]

# Parameters of one network: any pytree of arrays.
Params = Any


class Network(NamedTuple):
    """A module as two pure functions.

    Attributes:
      init: rng_key -> parameters, a pytree (``nnx.State`` for NNX, nested dicts for Linen).
      apply: (parameters, *inputs) -> outputs.
    """

    init: Callable[[jax.Array], Params]
    apply: Callable[..., Any]


def functional(module: Any, *example_inputs: Any) -> Network:
    """The pure ``init`` and ``apply`` of an NNX or Linen module.

    Args:
      module: NNX: a constructor, that is a class or function whose one open argument is an
        ``nnx.Rngs`` (by the keyword ``rngs`` where it has one), such as
        ``functools.partial(MLP, 8, 50)``. Linen: a module instance.
      *example_inputs: what the module is called with, shapes and dtypes only; Linen needs them to
        initialise, for NNX they are optional and have the call checked here.

    Returns:
      A ``Network``.

    Raises:
      ValueError: where the module keeps state besides its parameters (BatchNorm statistics, dropout
        keys) or draws random numbers when called. A log density has to be a function of the
        parameters alone.
      TypeError: where ``module`` is neither of the two.
    """
    if isinstance(module, linen.Module):
        return _linen(module, example_inputs)
    if isinstance(module, nnx.Module):
        raise TypeError(
            "module must be a constructor taking nnx.Rngs, so that every particle is initialised "
            f"on its own; got an instance of {type(module).__name__}"
        )
    if not callable(module) or (isinstance(module, type) and issubclass(module, linen.Module)):
        raise TypeError(
            "module must be a Linen module instance or a constructor of an NNX module taking "
            f"nnx.Rngs, got {module!r}"
        )
    return _nnx(module, example_inputs)


def init_particles(rng_key: jax.Array, module: Any, n: int, *example_inputs: Any) -> Params:
    """Parameters of n independently initialised copies of a module.

    Args:
      rng_key: a key of ``jax.random``.
      module: as for ``functional``, or the ``Network`` that it returned.
      n: the number of particles, at least 1.
      *example_inputs: as for ``functional``.

    Returns:
      The module's parameters, (n, ...) on every leaf. Particle i has the parameters that the module
      gets from key i of ``jax.random.split(rng_key, n)``.

    Raises:
      ValueError: for n < 1, and as ``functional`` does.

    Example:
      >>> import functools, jax, jsvgd.flax
      >>> from flax import nnx
      >>> constructor = functools.partial(nnx.Linear, 3, 1)
      >>> jsvgd.flax.init_particles(jax.random.key(0), constructor, 20)["kernel"].shape
      (20, 3, 1)
    """
    n = at_least("n", n, 1)
    network = module if isinstance(module, Network) else functional(module, *example_inputs)
    return jax.vmap(network.init)(jax.random.split(rng_key, n))


def particles_from_models(models: Sequence[Any]) -> Params:
    """The parameters of models that were trained one by one, as particles: a deep ensemble.

    Args:
      models: modules of NNX; or for Linen their parameters, variables (``{"params": ...}``) or train
        states (whatever has ``params``). All of one architecture.

    Returns:
      Parameters, (n, ...) on every leaf, in the form that ``functional(...).apply`` takes.

    Raises:
      ValueError: for an empty list, models of different architectures, and modules that keep state
        besides their parameters.
    """
    models = list(models)
    if not models:
        raise ValueError("models must hold at least one model, got none")
    found = [_params_of(model) for model in models]
    shapes = [jax.tree.map(jax.numpy.shape, params) for params in found]
    for i, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                f"models must all have one architecture; model {i} has parameters of shapes {shape}, "
                f"model 0 of {shapes[0]}"
            )
    return jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *found)


def _params_of(model: Any) -> Params:
    if isinstance(model, nnx.Module):
        _, params, rest = nnx.split(model, nnx.Param, ...)
        _refuse_state(type(model).__name__, _variables(rest))
        return params
    params = getattr(model, "params", model)
    if params is not model:
        _refuse_state(type(model).__name__, _collections_beside(model, params))
    if isinstance(params, Mapping) and "params" in params:
        _refuse_state("of Linen", {f"collection {key!r}" for key in params if key != "params"})
        params = params["params"]
    return params


def _collections_beside(state: Any, params: Params) -> set[str]:
    """Fields of a train state that hold variables (batch_stats), but for averages of the parameters."""
    structure = jax.tree.structure(params)
    return {
        f"{name} (a field of {type(state).__name__})"
        for name, value in getattr(state, "__dict__", {}).items()
        if name not in ("params", "opt_state")
        and isinstance(value, Mapping)
        and jax.tree.leaves(value)
        and jax.tree.structure(value) != structure
    }


def _variables(state: nnx.State) -> set[str]:
    return {
        f"{'.'.join(map(str, path))} ({type(variable).__name__})"
        for path, variable in nnx.to_flat_state(state)
    }


def _nnx(constructor: Callable[..., nnx.Module], example_inputs: tuple) -> Network:
    construct = _by_rngs(constructor)
    abstract = nnx.eval_shape(lambda: construct(nnx.Rngs(0)))
    if not isinstance(abstract, nnx.Module):
        raise TypeError(f"module must construct an nnx.Module, got {type(abstract).__name__}")
    graph, params, rest = nnx.split(abstract, nnx.Param, ...)
    _refuse_state(type(abstract).__name__, _variables(rest))

    def init(rng_key):
        return nnx.split(construct(nnx.Rngs(rng_key)), nnx.Param, ...)[1]

    def apply(params, *inputs):
        return nnx.merge(graph, params)(*inputs)

    if example_inputs:
        jax.eval_shape(apply, params, *example_inputs)
    return Network(init, apply)


def _by_rngs(constructor: Callable) -> Callable[[nnx.Rngs], Any]:
    """The constructor with its Rngs passed by keyword where it is called ``rngs``, else by position."""
    inner = constructor
    while isinstance(inner, functools.partial):
        inner = inner.func
    # The signature of an NNX class is that of its metaclass, (*args, **kwargs): ask its __init__.
    parameters = inspect.signature(inner.__init__ if isinstance(inner, type) else inner).parameters
    if "rngs" in parameters:
        return lambda rngs: constructor(rngs=rngs)
    return constructor


def _linen(module: linen.Module, example_inputs: tuple) -> Network:
    name = type(module).__name__
    if not example_inputs:
        raise ValueError(f"example_inputs must be given to initialise the Linen module {name}")
    variables = jax.eval_shape(module.init, jax.random.key(0), *example_inputs)
    _refuse_state(
        name, {f"collection {collection!r}" for collection in variables if collection != "params"}
    )

    def init(rng_key):
        return module.init(rng_key, *example_inputs).get("params", {})

    def apply(params, *inputs):
        return module.apply({"params": params}, *inputs)

    try:
        jax.eval_shape(apply, variables.get("params", {}), *example_inputs)
    except flax.errors.InvalidRngError as error:
        raise ValueError(
            f"module {name} draws random numbers when called (dropout?); a particle's log density "
            "must not. Make it deterministic"
        ) from error
    return Network(init, apply)


def _refuse_state(name: str, state: set[str]) -> None:
    if state:
        raise ValueError(
            f"module {name} keeps state besides its parameters: {', '.join(sorted(state))}. A "
            "particle is its parameters alone: statistics that change in training (BatchNorm) and "
            "random keys (dropout) have no gradient to follow. Use LayerNorm, or leave dropout out"
        )
