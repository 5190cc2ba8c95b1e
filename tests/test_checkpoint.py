"""Checkpoints: what is restored is bitwise what an unbroken run has, and nothing else is accepted."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jsvgd
from experiments import kill_and_resume
from tests.problems import assert_trees_equal, network_particles

pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed")

KEY = jax.random.key(3)
ROWS = {"y": np.arange(23, dtype=np.float32) / 10}
ROOT = Path(__file__).resolve().parents[1]


def log_density(position, batch):
    centre = jnp.mean(batch["y"])
    return -0.5 * sum(jnp.sum((leaf - centre) ** 2) for leaf in jax.tree.leaves(position))


@pytest.fixture(scope="module")
def sampler():
    return jsvgd.svgd(log_density, optax.adam(0.05))


@pytest.fixture(scope="module")
def state(sampler):
    return sampler.init(network_particles())


def stop_at(steps):
    class Stopped(Exception):
        pass

    def callback(step, state, info):
        if step >= steps:
            raise Stopped

    return Stopped, callback


@pytest.mark.parametrize("broken_at", [4, 10, 13])
def test_a_broken_run_ends_bitwise_where_an_unbroken_one_does(sampler, state, tmp_path, broken_at):
    options = {"data": ROWS, "batch_size": 5, "every": 3, "keep_particles": True}
    whole, whole_history = jsvgd.run(KEY, sampler, state, 25, **options)
    Stopped, callback = stop_at(broken_at)
    checkpoint = jsvgd.Checkpoint(tmp_path / "run", every=4)
    with pytest.raises(Stopped):
        jsvgd.run(KEY, sampler, state, 25, checkpoint=checkpoint, callback=callback, **options)
    end, history = jsvgd.run(KEY, sampler, state, 25, checkpoint=checkpoint, **options)
    assert_trees_equal(end, whole)
    assert_trees_equal(history, whole_history)
    again, history = jsvgd.run(KEY, sampler, state, 25, checkpoint=checkpoint, **options)
    assert_trees_equal(again, whole)
    assert_trees_equal(history, whole_history)
    more, history = jsvgd.run(KEY, sampler, state, 31, checkpoint=checkpoint, **options)
    assert int(more.step) == 31
    np.testing.assert_array_equal(history.step, [*range(3, 31, 3), 31])


def test_a_resumed_run_makes_only_the_steps_that_are_missing(sampler, state, tmp_path):
    seen = []
    watch = lambda step, state, info: seen.append(step)
    options = {"data": ROWS, "every": 5, "callback": watch, "checkpoint": tmp_path / "run"}
    jsvgd.run(KEY, sampler, state, 10, **options)
    jsvgd.run(KEY, sampler, state, 20, **options)
    assert seen == [5, 10, 15, 20]


def test_no_more_checkpoints_are_kept_than_asked_for(sampler, state, tmp_path):
    checkpoint = jsvgd.Checkpoint(tmp_path / "run", every=3, keep=2)
    jsvgd.run(KEY, sampler, state, 14, data=ROWS, checkpoint=checkpoint)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["12", "14"]


@pytest.mark.parametrize("kind", ["function", "iterable", "iterator"])
def test_batches_of_an_iterator_go_on_where_they_were(sampler, state, tmp_path, kind):
    batches = [{"y": np.full(4, i, np.float32)} for i in range(20)]

    def data():
        if kind == "function":
            return lambda step: iter(batches[step:])
        return iter(batches) if kind == "iterator" else Loader()

    class Loader:
        def __iter__(self):
            return iter(batches)

    whole, _ = jsvgd.run(KEY, sampler, state, 18, data=data())
    Stopped, callback = stop_at(8)
    options = {"checkpoint": jsvgd.Checkpoint(tmp_path / "run", every=5)}
    with pytest.raises(Stopped):
        jsvgd.run(KEY, sampler, state, 18, data=data(), callback=callback, **options)
    end, history = jsvgd.run(KEY, sampler, state, 18, data=data(), **options)
    assert_trees_equal(end, whole)
    np.testing.assert_array_equal(history.step, np.arange(1, 19))
    done, history = jsvgd.run(KEY, sampler, state, 18, data=data(), **options)
    assert_trees_equal(done, whole)
    assert history.step.shape == (18,)


def test_a_run_that_a_callback_has_ended_stays_ended(sampler, state, tmp_path):
    options = {"data": ROWS, "checkpoint": tmp_path / "run"}
    end, _ = jsvgd.run(KEY, sampler, state, 20, callback=lambda step, *_: step == 7, **options)
    again, history = jsvgd.run(KEY, sampler, state, 20, **options)
    assert int(again.step) == 7
    assert_trees_equal(again, end)
    assert len(history.step) == 7


def test_random_keys_and_empty_arrays_in_the_state_survive(tmp_path):
    def init(params):
        return {"key": jax.random.key(5), "none": jnp.zeros((0, 3)), "count": jnp.int32(0)}

    def update(updates, state, params=None):
        key, noise = jax.random.split(state["key"])
        updates = jax.tree.map(
            lambda g: -0.1 * g + 0.01 * jax.random.normal(noise, g.shape), updates
        )
        return updates, {**state, "key": key, "count": state["count"] + 1}

    noisy = jsvgd.svgd(lambda x: -0.5 * (x @ x), optax.GradientTransformation(init, update))
    state = noisy.init(np.linspace(-1, 1, 12, dtype=np.float32).reshape(6, 2))
    whole, _ = jsvgd.run(KEY, noisy, state, 9)
    for steps in (4, 9):
        end, _ = jsvgd.run(KEY, noisy, state, steps, checkpoint=tmp_path / "run")
    np.testing.assert_array_equal(end.particles, whole.particles)
    np.testing.assert_array_equal(
        jax.random.key_data(end.optimizer_state["key"]),
        jax.random.key_data(whole.optimizer_state["key"]),
    )
    assert end.optimizer_state["none"].shape == (0, 3)


def test_another_run_is_refused_with_what_differs(sampler, state, tmp_path):
    folder = tmp_path / "run"
    jsvgd.run(KEY, sampler, state, 5, data=ROWS, checkpoint=folder)

    def refused(message, key=KEY, sampler=sampler, state=state, steps=9, **options):
        with pytest.raises(ValueError, match=message):
            jsvgd.run(key, sampler, state, steps, data=ROWS, checkpoint=folder, **options)

    fewer = sampler.init(network_particles(n=19))
    refused(r"particles\['bias'\] is float32\[20, 2\] there and float32\[19, 2\] here", state=fewer)
    half = sampler.init(network_particles(dtype=jnp.bfloat16))
    refused(r"is float32\[20\] there and bfloat16\[20\] here", state=half)
    other = jsvgd.svgd(log_density, optax.sgd(0.05))
    refused(
        r"optimizer_state.*there and absent here",
        sampler=other,
        state=other.init(network_particles()),
    )
    refused("rng_key is .* there and .* here", key=jax.random.key(4))
    refused("record.*particles.*absent there", keep_particles=True)
    begun, _ = jsvgd.run(KEY, sampler, state, 2, data=ROWS)
    refused("began at step 0 there and at 2 here", state=begun)
    refused("num_steps must be at least the 5 steps", steps=4)
    [about] = folder.glob("*/about/metadata")
    written = json.loads(about.read_text())
    about.write_text(json.dumps({**written, "format": 99}))
    refused("has format 99, this version of jsvgd reads 2")


def test_bad_options_are_named(sampler, state, tmp_path):
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        jsvgd.Checkpoint(tmp_path, every=0)
    with pytest.raises(TypeError, match=r"keep must be a whole number, got 1\.5"):
        jsvgd.Checkpoint(tmp_path, keep=1.5)
    with pytest.raises(
        TypeError, match=r"checkpoint must be a folder or a jsvgd\.Checkpoint, got int"
    ):
        jsvgd.run(KEY, sampler, state, 5, data=ROWS, checkpoint=3)


def test_without_orbax_one_line_says_what_to_install(sampler, state, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    monkeypatch.setitem(sys.modules, "orbax", None)
    with pytest.raises(ImportError, match=r"pip install 'jsvgd\[checkpoint\]'") as raised:
        jsvgd.run(KEY, sampler, state, 5, data=ROWS, checkpoint=tmp_path)
    assert "\n" not in str(raised.value)


def test_ctrl_c_saves_what_is_done(tmp_path, ctrl_c):
    """A script is interrupted once it has begun; what it leaves is a checkpoint between two saves."""
    folder = tmp_path / "run"
    options = ["--steps", "2000", "--every", "100000", "--pause", "0.01"]
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.kill_and_resume", "--worker", str(folder), *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout.readline().startswith("step")
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    assert process.returncode != 0
    [step] = [int(p.name) for p in folder.iterdir() if p.name.isdigit()]
    assert 0 < step < 2000
    sampler, state, options = kill_and_resume.problem()
    resumed, _ = jsvgd.run(
        kill_and_resume.KEY, sampler, state, step + 3, checkpoint=folder, **options
    )
    expected, _ = jsvgd.run(kill_and_resume.KEY, sampler, state, step + 3, **options)
    assert_trees_equal(resumed, expected)


def test_killed_runs_resume_bitwise():
    """Two kills here; ``python -m experiments.kill_and_resume`` makes ten."""
    result = subprocess.run(
        [sys.executable, "-m", "experiments.kill_and_resume", "--kills", "2", "--steps", "100"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 of 2" in result.stdout
