"""Checkpoints when things go wrong: Ctrl-C in the middle of a save, full disks, folders of others."""

import json
import shutil
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jsvgd
from tests.problems import assert_trees_equal

ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax is not installed")

KEY = jax.random.key(3)
ROWS = np.arange(24, dtype=np.float32).reshape(12, 2) / 10
PARTICLES = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)


@pytest.fixture(scope="module")
def sampler():
    return jsvgd.svgd(lambda x, rows: -0.5 * jnp.sum((x - rows) ** 2), optax.adam(0.05))


@pytest.fixture(scope="module")
def state(sampler):
    return sampler.init(PARTICLES)


@pytest.mark.parametrize("moment", ["before", "after", "twice"])
def test_ctrl_c_during_a_save_is_what_comes_out(
    sampler, state, tmp_path, monkeypatch, ctrl_c, moment
):
    """The signal comes before Orbax's own save, or after it and before we know of it."""
    save, saved = ocp.CheckpointManager.save, []

    def interrupted(manager, step, **options):
        if moment in ("before", "twice"):
            signal.raise_signal(signal.SIGINT)
        saved.append(step)
        result = save(manager, step, **options)
        if moment in ("after", "twice"):
            signal.raise_signal(signal.SIGINT)
        return result

    handler = signal.getsignal(signal.SIGINT)
    folder = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(ocp.CheckpointManager, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoint = jsvgd.Checkpoint(folder, every=4)
            jsvgd.run(KEY, sampler, state, 20, data=ROWS, checkpoint=checkpoint)
    assert saved == [4]
    assert signal.getsignal(signal.SIGINT) is handler
    end, history = jsvgd.run(KEY, sampler, state, 20, data=ROWS, checkpoint=folder)
    whole, whole_history = jsvgd.run(KEY, sampler, state, 20, data=ROWS)
    assert_trees_equal(end, whole)
    assert_trees_equal(history, whole_history)


def test_runs_in_other_threads_save_too(sampler, state, tmp_path):
    """Python lets the main thread alone touch the handlers of signals."""
    ends = []
    work = lambda: ends.append(
        jsvgd.run(KEY, sampler, state, 5, data=ROWS, checkpoint=tmp_path / "run")
    )
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert int(ends[0][0].step) == 5 and (tmp_path / "run" / "5").is_dir()


def test_an_error_of_the_run_is_not_hidden_by_one_of_the_disk(
    sampler, state, tmp_path, monkeypatch
):
    attempts = []

    def full(manager, step, **options):
        attempts.append(step)
        raise OSError("No space left on device")

    class Stopped(Exception):
        pass

    def callback(step, state, info):
        if step == 3:
            raise Stopped

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    options = {"data": ROWS, "checkpoint": tmp_path / "run"}
    with pytest.raises(Stopped) as raised:
        jsvgd.run(KEY, sampler, state, 9, callback=callback, **options)
    [note] = raised.value.__notes__
    assert "checkpoint of step 3" in note and "No space left" in note and str(tmp_path) in note
    with pytest.raises(OSError, match=r"checkpoint of step 9 in .*run cannot be written.*No space"):
        jsvgd.run(KEY, sampler, state, 9, **options)
    assert attempts == [3, 9]


def test_another_start_other_data_and_other_settings_are_refused(sampler, state, tmp_path):
    """Of equal shapes, all of them."""
    folder = tmp_path / "run"
    given = {"state": state, "data": ROWS, "batch_size": 3, "every": 2}
    jsvgd.run(KEY, sampler, num_steps=5, checkpoint=folder, **given)

    def refused(message, **changed):
        with pytest.raises(ValueError, match=message):
            jsvgd.run(KEY, sampler, num_steps=9, checkpoint=folder, **{**given, **changed})

    refused("the run began with other particles", state=sampler.init(PARTICLES + 1))
    warm = optax.tree.set(state.optimizer_state, mu=jnp.ones_like(state.particles))
    refused("the run began with other optimizer state", state=state._replace(optimizer_state=warm))
    refused(r"data is float32\[12, 2\] there and float32\[10, 2\] here", data=ROWS[:10])
    refused("data holds other numbers", data=ROWS + 1)
    refused("batch_size is 3 there and 4 here", batch_size=4)
    refused("every is 2 there and 3 here", every=3)
    refused(r"data is float32\[12, 2\] there and absent here", data=iter([ROWS]), batch_size=None)
    end, _ = jsvgd.run(KEY, sampler, num_steps=9, checkpoint=folder, **given)
    assert int(end.step) == 9


def test_many_rows_are_told_apart_by_some_of_them(sampler, state, tmp_path):
    rows = np.zeros((5001, 2), np.float32)
    run = lambda data: jsvgd.run(KEY, sampler, state, 2, data=data, checkpoint=tmp_path / "run")
    run(rows)
    run(jnp.asarray(rows))
    with pytest.raises(ValueError, match="data holds other numbers"):
        run(rows + 1)


def test_folders_of_others_are_named(sampler, state, tmp_path):
    def run(folder):
        jsvgd.run(KEY, sampler, state, 5, data=ROWS, checkpoint=folder)

    file = tmp_path / "file"
    file.write_text("a file")
    with pytest.raises(NotADirectoryError, match=r"must be a folder, got the file .*file"):
        run(file)
    with pytest.raises(OSError, match=r"checkpoint folder .*below cannot be used"):
        run(file / "below")
    foreign = tmp_path / "foreign"
    (foreign / "7").mkdir(parents=True)
    (foreign / "7" / "notes.txt").write_text("nothing of ours")
    with pytest.raises(ValueError, match=r"step 7 in .*foreign cannot be read: expected its about"):
        run(foreign)
    run(tmp_path / "ours")
    shutil.rmtree(tmp_path / "ours" / "5" / "arrays")
    with pytest.raises(ValueError, match=r"step 5 in .*ours cannot be read: expected its arrays"):
        run(tmp_path / "ours")
    about = tmp_path / "ours" / "5" / "about" / "metadata"
    about.write_text(json.dumps({"format": 1}))
    with pytest.raises(ValueError, match="has format 1, this version of jsvgd reads 2"):
        run(tmp_path / "ours")
