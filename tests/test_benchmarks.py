"""The benchmark of the direction runs, compares with float64, and writes what the README is made from."""

import json
import sys

from experiments import benchmark_direction, benchmark_peers
from experiments.benchmark_report import call_table, describe, step_table, table


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


def test_whole_steps_are_timed_in_a_loop_and_call_by_call(capsys):
    rows = []

    def report(name, **figures):
        rows.append({"work": "step", "chains": 1, "n": 40, "d": 3, "name": name, **figures})

    benchmark_peers.measure_steps(40, 3, benchmark_peers.prepare_steps(40, 3), report)
    assert {"jsvgd", "XLA with a sort"} <= {row["name"] for row in rows}
    assert all(row["milliseconds"] > 0 and row["called"] > 0 for row in rows)
    assert "called from Python" in describe(rows[0], rows)
    loop, calls = (made(rows).splitlines()[-1] for made in (step_table, call_table))
    for line, key in ((loop, "milliseconds"), (calls, "called")):
        assert line.startswith(f"| 40, 3 | {rows[0][key]:.3g} |")
