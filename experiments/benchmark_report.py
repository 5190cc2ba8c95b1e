"""What the benchmarks show of their rows: lines, the README's tables, the roofline picture.

    python -m experiments.benchmark_report experiments/results/benchmark_direction.json
    python -m experiments.benchmark_report experiments/results/benchmark_bandwidth_gpu.json

prints the tables of kept results and draws the roofline picture of the direction beside them. A row is a
dictionary: n, d, name and the figures (milliseconds, error, termwise, bytes); those of the direction also
have work, chains, floor (milliseconds) and implementation, those of whole steps called (milliseconds a step
called from Python). A row of an earlier run than the others says earlier.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

__all__ = ["call_table", "describe", "median_table", "picture", "step_table", "table"]


def describe(row, rows):
    chains = f"{row['chains']}x" if row["chains"] > 1 else ""
    ours = next(
        (
            r
            for r in rows
            if r["name"] == "jsvgd" and all(r[k] == row[k] for k in ("work", "chains", "n", "d"))
        ),
        row,
    )
    shape = f"{chains}{row['n']} x {row['d']}"
    text = f"{row['work']:9s} {shape:14s} {row['name']:15s} {row['milliseconds']:10.4f} ms"
    text += f"  {row['milliseconds'] / ours['milliseconds']:6.2f}x"
    if row.get("error") is not None:
        text += f"  error {row['error']:.1e}"
    if row.get("termwise") is not None:
        text += f"  termwise {row['termwise']:.1e}"
    if row.get("bytes"):
        text += f"  {row['bytes'] / 1e6:9.1f} MB"
    if row.get("called"):
        text += f"  {row['called']:.4f} ms called from Python"
    if row.get("implementation"):
        text += f"  {row['implementation']}"
    return text


def table(rows) -> str:
    """Directions and gradients as Markdown: jsvgd beside XLA, a line a shape."""
    lines = [
        "| work | N, d | implementation | ms | XLA float32 | XLA TF32 "
        "| error (XLA float32, TF32) | memory (XLA) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for ours in (row for row in rows if row["name"] == "jsvgd" and row["work"] != "step"):
        others = {
            row["name"]: row
            for row in rows
            if all(row[key] == ours[key] for key in ("work", "chains", "n", "d"))
        }
        ieee, tf32 = (others.get(f"XLA {kind}", {}) for kind in ("float32", "TF32"))

        def slower(other, ours=ours):
            return f"{other['milliseconds'] / ours['milliseconds']:.2f}x" if other else "-"

        def shown(row, key, form):
            return form(row[key]) if row.get(key) is not None else "-"

        errors = [shown(row, "error", "{:.1e}".format) for row in (ours, ieee, tf32)]
        sizes = [shown(row, "bytes", lambda b: f"{b / 1e6:.0f} MB") for row in (ours, ieee)]
        chains = f"{ours['chains']} chains of " if ours["chains"] > 1 else ""
        milliseconds = ours["milliseconds"]
        time = f"{milliseconds:.3g}" if milliseconds < 999 else f"{milliseconds:.0f}"
        lines.append(
            f"| {ours['work']} | {chains}{ours['n']}, {ours['d']} | {ours['implementation']} "
            f"| {time} | {slower(ieee)} | {slower(tf32)} "
            f"| {errors[0]} ({errors[1]}, {errors[2]}) | {sizes[0]} ({sizes[1]}) |"
        )
    return "\n".join(lines)


def step_table(rows) -> str:
    """Whole steps as Markdown: jsvgd beside what else there is, as multiples of its time."""
    return _beside(
        [row for row in rows if row["work"] == "step"],
        "jsvgd",
        ("XLA with a sort", "BlackJAX", "PyTorch program"),
    )


def call_table(rows) -> str:
    """As `step_table`, each step a call from Python."""
    return step_table([{**row, "milliseconds": row["called"]} for row in rows if "called" in row])


def median_table(rows) -> str:
    """Median bandwidths as Markdown: jsvgd beside its gradient and sorting, as multiples of its time."""
    return _beside(rows, "jsvgd", ("with gradient", "sort", "xla"))


def _beside(rows, own, others) -> str:
    lines = [f"| N, d | ms | {' | '.join(others)} |", "|---" * (2 + len(others)) + "|"]
    for ours in (row for row in rows if row["name"] == own):
        same = {row["name"]: row for row in rows if (row["n"], row["d"]) == (ours["n"], ours["d"])}
        ratios = [
            f"{same[name]['milliseconds'] / ours['milliseconds']:.1f}x" if name in same else "-"
            for name in others
        ]
        lines.append(
            f"| {ours['n']}, {ours['d']} | {ours['milliseconds']:.3g} | {' | '.join(ratios)} |"
        )
    return "\n".join(lines)


def picture(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, key in zip(axes, ("n", "d"), strict=True):
        for name, marker in (("jsvgd", "o"), ("XLA float32", "s"), ("XLA TF32", "^")):
            points = [
                r for r in rows if r["name"] == name and r.get("floor") and r["work"] != "step"
            ]
            axis.loglog(
                [r[key] for r in points],
                [r["milliseconds"] / r["floor"] for r in points],
                marker,
                label=name,
                alpha=0.75,
            )
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xlabel("particles N" if key == "n" else "dimensions d")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time over the floor (1 = roofline)")
    axes[0].legend()
    figure.suptitle("Time over the larger of arithmetic and memory time")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="what a benchmark wrote")
    results = parser.parse_args().results
    rows = json.loads(results.read_text())["rows"]
    if "work" not in rows[0]:
        print(median_table(rows))
        return
    print(table(rows), step_table(rows), call_table(rows), sep="\n\n")
    picture(rows, results.with_suffix(".png"))


if __name__ == "__main__":
    main()
