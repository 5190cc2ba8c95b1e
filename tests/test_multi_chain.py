"""Chains in one program: each is the chain alone, and the script says where they are wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import chain_targets, multi_chain


def test_each_chain_of_the_program_is_the_chain_alone():
    target = chain_targets.two_modes()
    functions = (target.log_density, target.dimension, target.start_sd)
    keys = jax.random.split(jax.random.key(0), 4)
    step_sizes, factors = jnp.array([0.05, 0.1, 0.2, 0.1]), jnp.array([0.5, 1.0, 1.0, 2.0])
    together = multi_chain.run_chains(functions, 16, 20, keys, step_sizes, factors)
    for i in range(4):
        part = slice(i, i + 1)
        alone = multi_chain.run_chains(
            functions, 16, 20, keys[part], step_sizes[part], factors[part]
        )
        np.testing.assert_allclose(together[i], alone[0], rtol=1e-4, atol=1e-4)
    same_key = multi_chain.run_chains(
        functions, 16, 20, jnp.stack([keys[0]] * 4), step_sizes, factors
    )
    # One key, but step sizes and bandwidths of their own.
    assert all(not np.allclose(same_key[0], same_key[i], atol=1e-3) for i in (1, 2, 3))


@pytest.mark.parametrize("make", [chain_targets.two_modes, chain_targets.banana])
def test_the_exact_moments_are_those_of_the_density(x64, make):
    target = make()
    x = np.linspace(target.mean[0] - 12 * target.sd[0], target.mean[0] + 12 * target.sd[0], 1201)
    y = np.linspace(target.mean[1] - 14 * target.sd[1], target.mean[1] + 14 * target.sd[1], 1201)
    points = jnp.stack([g.ravel() for g in np.meshgrid(x, y)], axis=1)
    density = np.exp(np.asarray(jax.vmap(target.log_density)(points)))
    density /= density.sum()
    mean = density @ points
    np.testing.assert_allclose(mean, target.mean, atol=1e-3)
    np.testing.assert_allclose(np.sqrt(density @ (points - mean) ** 2), target.sd, rtol=1e-3)


def test_nuts_finds_a_gaussian():
    pytest.importorskip("blackjax", reason="BlackJAX is not installed")
    scale = jnp.array([1.0, 3.0])
    log_density = lambda x: -0.5 * jnp.sum(((x - 1) / scale) ** 2)
    draws = chain_targets.long_nuts_run(jax.random.key(0), log_density, 2, 2000, num_warmup=200)
    assert draws.shape == (2000, 2)
    np.testing.assert_allclose(draws.mean(0), 1, atol=0.4)
    np.testing.assert_allclose(draws.std(0), scale, rtol=0.15)


def test_the_verdict_is_about_the_truth_and_not_about_agreement():
    target = chain_targets.two_modes()
    rng = np.random.default_rng(0)
    pick = rng.random((8, 4000)) < 0.3
    good = np.where(pick[..., None], chain_targets.MODES[0], chain_targets.MODES[1])
    good = good + rng.normal(size=good.shape)
    assert "within 0.1 sd" in multi_chain.summary(target, good)
    one_mode = chain_targets.MODES[1] + rng.normal(size=good.shape)
    shown = multi_chain.summary(target, one_mode)
    assert "the mean is off" in shown and "variances collapse" in shown
    assert "0.7): 0.99" in shown or "0.7): 1.000" in shown


def test_the_script_writes_table_picture_and_particles(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    options = ["--chains", "3", "--particles", "8", "--steps", "5", "--output", str(tmp_path)]
    multi_chain.main([*options, "--targets", "two_modes", "banana"])
    shown = capsys.readouterr().out
    for what in ("two modes", "banana", "R-hat", "weight of the right mode", "3 chains"):
        assert what in shown
    assert (tmp_path / "chains.png").stat().st_size > 5000
    with np.load(tmp_path / "banana.npz") as saved:
        assert saved["particles"].shape == (3, 8, 2)
