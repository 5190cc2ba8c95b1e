"""Ways to a posterior, each as function(target, seed, start, budget) -> draws of the unconstrained vector.

``fit`` takes the steps it is given, vanilla SVGD 2000; the other libraries get the wall time that ``fit``
took (compilation aside), in rounds of a fixed number of steps, and at least one round.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jsvgd
from experiments.posterior_models import Target
from jsvgd.fit import fit

__all__ = ["METHODS", "PEERS", "Draws", "run_fit"]

ROUND = 100  # steps, between two looks at the clock


class Draws(NamedTuple):
    """What a method made.

    Attributes:
      values: of the unconstrained vector, (M, d).
      seconds: wall time without compilation.
      steps: of the method.
      verdict: of ``fit``; empty for the others.
    """

    values: np.ndarray
    seconds: float
    steps: int
    verdict: str = ""


def run_fit(target: Target, seed: int, start: jax.Array, num_steps: int, **options) -> Draws:
    """``jsvgd.fit``, timed on its second call."""
    call = functools.partial(
        fit, jax.random.key(seed), target.logdensity, start, num_steps=num_steps, **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the verdict is in the table
        call(stop_after=1)  # compiles
        began = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - began
    return Draws(np.asarray(result.unconstrained), seconds, num_steps, result.verdict.split(":")[0])


def _rounds(step: Callable, state, key, budget: float, least_steps: int = ROUND):
    """``step(key, state)`` in compiled rounds until the budget is spent; the state, seconds, steps."""

    @jax.jit
    def one_round(key, state):
        return jax.lax.scan(
            lambda state, key: (step(key, state), None), state, jax.random.split(key, ROUND)
        )[0]

    jax.block_until_ready(one_round(key, state))  # compiles
    began, steps = time.perf_counter(), 0
    while steps < least_steps or time.perf_counter() - began < budget:
        state = jax.block_until_ready(one_round(jax.random.fold_in(key, steps), state))
        steps += ROUND
    return state, time.perf_counter() - began, steps


def _vanilla(rule: str, target, seed, start, budget) -> Draws:
    """2000 steps of SVGD in the parameters' own units with Adam, as most examples have it."""
    del budget
    sampler = jsvgd.svgd(target.logdensity, optax.adam(0.05), bandwidth=rule)
    state, seconds, steps = _rounds(
        lambda key, state: sampler.step(key, state)[0],
        sampler.init(start),
        jax.random.key(seed),
        budget=0.0,
        least_steps=2000,
    )
    return Draws(np.asarray(state.particles), seconds, steps)


def _whitened(rule: str, target, seed, start, budget) -> Draws:
    """The recipe of ``fit`` with the bandwidth rule of others and without the linear kernel."""
    del budget
    return run_fit(target, seed, start, 1000, bandwidth=rule, linear_weight=0.0, widening=1.0)


def _blackjax_svgd(target, seed, start, budget) -> Draws:
    import blackjax

    algorithm = blackjax.svgd(jax.grad(target.logdensity), optax.adam(0.05))
    state, seconds, steps = _rounds(
        lambda key, state: algorithm.step(state),
        algorithm.init(start),
        jax.random.key(seed),
        budget,
    )
    return Draws(np.asarray(state.particles), seconds, steps)


def _blackjax_nuts(target, seed, start, budget) -> Draws:
    """One chain: 300 steps of window adaptation, counted in the time, and draws while it lasts."""
    import blackjax

    adaptation = blackjax.window_adaptation(blackjax.nuts, target.logdensity)
    key = jax.random.key(seed)
    adapt = jax.jit(lambda key, x: adaptation.run(key, x, num_steps=300)[0])
    jax.block_until_ready(adapt(key, start[0]))
    began = time.perf_counter()
    state, parameters = jax.block_until_ready(adapt(key, start[0]))
    spent = time.perf_counter() - began

    @jax.jit
    def one_round(key, state, parameters):
        def step(state, key):
            state, _ = blackjax.nuts.build_kernel()(key, state, target.logdensity, **parameters)
            return state, state.position

        return jax.lax.scan(step, state, jax.random.split(key, ROUND))

    arrays = {name: jnp.asarray(value) for name, value in parameters.items()}
    jax.block_until_ready(one_round(key, state, arrays))
    began, rounds = time.perf_counter(), []
    while not rounds or spent + time.perf_counter() - began < budget:
        state, positions = one_round(jax.random.fold_in(key, len(rounds)), state, arrays)
        rounds.append(np.asarray(positions))
    seconds = spent + time.perf_counter() - began
    return Draws(np.concatenate(rounds), seconds, 300 + ROUND * len(rounds))


def _numpyro_model(target):
    import numpyro
    from numpyro import distributions as dist

    def model():
        flat = dist.Normal(jnp.zeros(target.dimension), 1.0).to_event(1).mask(False)
        numpyro.factor("log_density", target.logdensity(numpyro.sample("u", flat)))

    return model


def _numpyro_stein(target, seed, start, budget) -> Draws:
    from numpyro import optim
    from numpyro.contrib.einstein import RBFKernel, SteinVI
    from numpyro.infer.autoguide import AutoDelta

    model = _numpyro_model(target)
    guide = AutoDelta(model)
    stein = SteinVI(model, guide, optim.Adam(0.05), RBFKernel(), num_stein_particles=start.shape[0])
    key = jax.random.key(seed)
    state = stein.init(key)
    name = next(iter(stein.get_params(state)))
    # SteinVI draws its own start: it gets ours.
    parameters = {**stein.get_params(state), name: start}
    state = state._replace(optim_state=stein.optim.init(parameters))
    state, seconds, steps = _rounds(lambda key, state: stein.update(state)[0], state, key, budget)
    return Draws(np.asarray(stein.get_params(state)[name]), seconds, steps)


def _numpyro_autonormal(target, seed, start, budget) -> Draws:
    """A mean-field normal by the ELBO; 1000 draws of it."""
    from numpyro import optim
    from numpyro.infer import SVI, Trace_ELBO, init_to_value
    from numpyro.infer.autoguide import AutoNormal

    model = _numpyro_model(target)
    guide = AutoNormal(model, init_loc_fn=init_to_value(values={"u": start[0]}))
    svi = SVI(model, guide, optim.Adam(0.02), Trace_ELBO())
    key = jax.random.key(seed)
    state, seconds, steps = _rounds(
        lambda key, state: svi.update(state)[0], svi.init(key), key, budget
    )
    draws = guide.sample_posterior(key, svi.get_params(state), sample_shape=(1000,))
    return Draws(np.asarray(draws["u"]), seconds, steps)


METHODS = {
    "vanilla SVGD, 2 med/log n": functools.partial(_vanilla, "median"),
    "vanilla SVGD, med/log(n+1)": functools.partial(_vanilla, "liu"),
    "whitened, med/log(n+1)": functools.partial(_whitened, "liu"),
    "whitened, med": functools.partial(_whitened, "no_log"),
}
PEERS = {
    "BlackJAX SVGD": _blackjax_svgd,
    "BlackJAX NUTS": _blackjax_nuts,
    "NumPyro SteinVI": _numpyro_stein,
    "NumPyro AutoNormal": _numpyro_autonormal,
}
