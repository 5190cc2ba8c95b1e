"""README says what the kept results say, and its example runs."""

import json
import pathlib
import re

from experiments.benchmark_report import call_table, median_table, step_table, table

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_gpu_tables_are_made_from_the_kept_results():
    for name, tables in (
        ("benchmark_direction", (table, step_table, call_table)),
        ("benchmark_bandwidth_gpu", (median_table,)),
    ):
        results = json.loads((ROOT / f"experiments/results/{name}.json").read_text())
        for made in tables:
            _, _, *lines = made(results["rows"]).splitlines()
            assert lines and made(results["rows"]) in README
        assert f"JAX {results['jax']}, {results['date']}" in README


def test_the_ten_line_example_runs(capsys):
    example = next(
        block
        for block in re.findall(r"```python\n(.*?)```", README, re.S)
        if "log_density" in block
    )
    exec(compile(example, "README.md", "exec"), {})
    means, *_ = capsys.readouterr().out.splitlines()
    assert "nan" not in means


def test_ci_runs_the_command_of_the_readme():
    commands = re.findall(r"```sh\n(python3 -m venv.*?)```", README, re.S)
    assert len(commands) == 2
    assert commands[1].strip() in (ROOT / ".ci/run").read_text()
