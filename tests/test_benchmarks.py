"""The benchmark of the direction runs, compares with float64, and writes what the README is made from."""

import json
import sys

from experiments import benchmark_direction
from experiments.benchmark_report import table


def test_the_quick_benchmark_of_the_direction(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--quick", "--output", str(tmp_path)])
    benchmark_direction.main()
    results = json.loads((tmp_path / "benchmark_direction.json").read_text())
    ours = [row for row in results["rows"] if row["name"] == "jsvgd"]
    cases = [(row["work"], row["chains"], row["n"], row["d"]) for row in ours]
    assert cases == benchmark_direction.QUICK
    assert all(row["error"] < 1e-5 and row["milliseconds"] > 0 for row in results["rows"])
    assert (tmp_path / "benchmark_direction.png").stat().st_size > 1000
    assert "333 x 7" in capsys.readouterr().out
    assert len(table(results["rows"]).splitlines()) == 2 + len(ours)
