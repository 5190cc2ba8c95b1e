"""The bandwidth benchmark runs, keeps its figures, and compares equal things."""

import concurrent.futures
import json

from experiments import benchmark_bandwidth


def test_quick_run_writes_figures_and_a_picture(tmp_path, capsys, little_optimized):
    rows = benchmark_bandwidth.main(["--quick", "--output", str(tmp_path)])
    kept = json.loads((tmp_path / "benchmark_bandwidth.json").read_text())
    assert kept["rows"] == rows and all(row["milliseconds"] > 0 for row in rows)
    assert (tmp_path / "benchmark_bandwidth.png").stat().st_size > 10_000
    for n, d in benchmark_bandwidth.QUICK:
        found = {r["name"]: r for r in rows if (r["n"], r["d"]) == (n, d)}
        assert {"jsvgd", "with gradient", "sort", "jsvgd step"} <= set(found)
        # Lower median against the mean of the middle two: close, both of the same matrix.
        ratio = found["jsvgd"]["bandwidth"] / found["sort"]["bandwidth"]
        assert abs(ratio - 1) < 1e-2
    assert "relative difference" in capsys.readouterr().out


def test_sort_is_left_out_where_it_would_be_too_large():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        names = list(benchmark_bandwidth.prepare_case(pool, 30, 2, largest_sort=29))
    assert names == ["jsvgd", "with gradient"]
