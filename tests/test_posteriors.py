"""The script of the posteriors: a tiny run of the whole, its parts, and README against the kept runs."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest
from scipy import stats

from experiments import posteriors
from experiments.command_line import InputError
from experiments.posterior_methods import METHODS, PEERS, Draws
from experiments.posterior_models import MODELS, analytic_targets, load_posterior
from experiments.posteriors import Run, independent_w1, measure, worst_w1

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
README = (ROOT / "README.md").read_text()
SECTION = README.split("## Posteriors one can believe")[1].split("\n## ")[0]
TINY = ["--only", "banana", "--no-peers", "--no-starts", "--seeds", "1"]
FIGURES = [field.name for field in dataclasses.fields(Run) if field.type == "float"]


@pytest.fixture(scope="module")
def kept():
    return [Run(**run) for run in json.loads((RESULTS / "posteriors.json").read_text())["runs"]]


@pytest.fixture(scope="module")
def targets():
    return {target.name: target for target in analytic_targets()}


# --- the script -------------------------------------------------------------------------------------


def test_a_tiny_run_writes_its_files_and_another_adds_to_them(tmp_path, monkeypatch, capsys):
    # Fewer steps than a banana needs, and one method beside fit.
    monkeypatch.setattr(posteriors, "BANANA_STEPS", 20)
    monkeypatch.setattr(posteriors, "METHODS", {"whitened, med": METHODS["whitened, med"]})
    options = [*TINY, "--output", str(tmp_path), "--name", "tiny"]
    posteriors.main([*options, "--sizes", "16:20"])
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"tiny.json", "tiny.md", "tiny.png"}
    record = json.loads((tmp_path / "tiny.json").read_text())
    assert record["versions"]["dtype"] == "float32"
    runs = [Run(**run) for run in record["runs"]]
    assert [(r.method, r.n, r.steps) for r in runs] == [
        ("jsvgd.fit", 16, 20),
        ("whitened, med", 16, 1000),
    ]
    assert all(np.isfinite(getattr(run, name)) for run in runs for name in FIGURES)
    assert runs[0].verdict and 0 < runs[0].smallest_sd <= runs[0].largest_sd
    table = (tmp_path / "tiny.md").read_text()
    assert table in capsys.readouterr().out
    posteriors.main([*options, "--sizes", "12:20", "--no-methods", "--add"])
    record = json.loads((tmp_path / "tiny.json").read_text())
    assert [run["n"] for run in record["runs"]] == [16, 16, 12]
    assert record["versions_12"]["platform"] == "cpu"
    assert (tmp_path / "tiny.md").read_text().startswith(table)


def test_errors_say_what_came(tmp_path):
    with pytest.raises(InputError, match="--only .* names no target"):
        posteriors.main(["--only", "nothing", "--output", str(tmp_path)])
    with pytest.raises(InputError, match=r"--add needs a .*posteriors\.json"):
        posteriors.main([*TINY, "--add", "--output", str(tmp_path)])
    with pytest.raises(InputError, match="no model is known for 'unknown'"):
        load_posterior(tmp_path / "unknown")


def test_runs_merge_by_target_and_replace_their_like(kept):
    first, second = kept[0], next(run for run in kept if run.target != kept[0].target)
    newer = dataclasses.replace(first, n=7)
    again = dataclasses.replace(second, w1=0.5)
    assert posteriors._merged([first, second], [newer, again]) == [first, newer, again]


# --- its figures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean_error", "smallest", "largest", "tight", "loose"),
    [
        (0.09, 0.91, 1.09, True, True),
        (0.11, 0.91, 1.09, False, True),
        (0.09, 0.89, 1.09, False, True),
        (0.09, 0.91, 1.11, False, True),
        (0.21, 1.0, 1.0, False, False),
        (0.0, 0.79, 1.0, False, False),
        (0.0, 1.0, 1.21, False, False),
        (np.nan, 1.0, 1.0, False, False),
    ],
)
def test_tight_and_loose_are_what_the_docstring_says(
    kept, mean_error, smallest, largest, tight, loose
):
    run = dataclasses.replace(
        kept[0], mean_error=mean_error, smallest_sd=smallest, largest_sd=largest
    )
    assert (run.tight, run.loose) == (tight, loose)


def test_measure_of_draws_that_are_shifted_and_scaled(targets):
    """N(0, I_50) moved by 0.3 and stretched by 1.5: the figures are those numbers."""
    target = targets["normal-50"]
    u = np.random.default_rng(0).normal(size=(20_000, 50))
    u = (u - u.mean(0)) / u.std(0, ddof=1)
    options = {"start": "N(0, 1)", "n": len(u), "seed": 0, "independent": 0.1}
    run = measure(target, "moved", Draws(1.5 * u + 0.3, 1.0, 10), **options)
    assert np.isclose(run.mean_error, 0.3, atol=1e-6)
    assert np.allclose([run.smallest_sd, run.largest_sd], 1.5, rtol=1e-5)
    assert np.isclose(run.parameter_mean_error, 0.3, atol=1e-5) and not run.loose
    assert run.w1_independent == 0.1 and run.w1 > 0.3


def test_distances_of_independent_draws(targets):
    """They fall as n^(-1/2), beyond the number of reference draws too."""
    banana = targets["banana"]
    few, many = (independent_w1(banana, n) for n in (1000, 16_384))
    assert len(banana.draws) < 16_384
    assert 0.6 < few / many / 16.384**0.5 < 1.6
    draws = banana.unconstrained_draws
    assert worst_w1(draws, draws) == 0
    assert np.isclose(worst_w1(draws + 2 * draws.std(0, ddof=1), draws), 2)


# --- the kept runs ----------------------------------------------------------------------------------

ROWS = {
    "`jsvgd.fit`": ("jsvgd.fit", 100),
    "`jsvgd.fit`, 500 particles, 4000 steps": ("jsvgd.fit", 500),
    "`jsvgd.fit`, 2000 particles, 2000 steps, one seed": ("jsvgd.fit", 2000),
    "`jsvgd.fit`, 16384 particles, 1000 steps, one seed": ("jsvgd.fit", 16384),
    "SVGD with the median rule": ("vanilla SVGD, 2 med/log n", 100),
    "SVGD, whitened, bandwidth med/log(n+1)": ("whitened, med/log(n+1)", 100),
    "SVGD, whitened, bandwidth med": ("whitened, med", 100),
    "BlackJAX NUTS": ("BlackJAX NUTS", 100),
    "BlackJAX SVGD": ("BlackJAX SVGD", 100),
    "NumPyro SteinVI": ("NumPyro SteinVI", 100),
    "NumPyro AutoNormal": ("NumPyro AutoNormal", 100),
}


def test_readme_counts_tight_and_loose_runs_as_kept(kept):
    table = re.search(r"\| method \| tight \| loose \|\n\|[-|]+\n((?:\|.*\n)+)", SECTION)[1]
    seen = []
    for line in table.splitlines():
        names, *counts = (cell.strip().removesuffix(" each") for cell in line.strip("|").split("|"))
        names = re.sub(r" \(one H200.*?\)", "", names).removesuffix(", equal wall time")
        for name in names.split("; "):
            method, n = ROWS[name]
            runs = [
                run
                for run in kept
                if (run.method, run.n, run.start) == (method, n, "N(0, 1)") and run.target in MODELS
            ]
            found = [sum(run.tight for run in runs), sum(run.loose for run in runs)]
            assert counts == [f"{count}/{len(runs)}" for count in found], name
            seen.append(name)
    assert seen == [*ROWS]
    assert set(METHODS) | set(PEERS) | {"jsvgd.fit"} >= {method for method, _ in ROWS.values()}


def test_readme_tells_distances_as_kept(kept):
    schools = next(name for name in MODELS if name.startswith("eight"))
    fits = [run for run in kept if run.method == "jsvgd.fit" and run.start == "N(0, 1)"]
    others = {run.target for run in fits} - {"banana", schools}
    assert len(others) == 8
    worst = []
    for n in (100, 500, 2000, 16384):
        cells = [str(n)]
        for names in ({"banana"}, {schools}, others):
            ratios = [r.w1 / r.w1_independent for r in fits if r.n == n and r.target in names]
            ends = [f"{end:.2f}" for end in (min(ratios), max(ratios))]
            cells.append(" to ".join(dict.fromkeys(ends)))
        assert f"| {' | '.join(cells)} |\n" in SECTION
        bananas = [run for run in fits if run.n == n and run.target == "banana"]
        worst.append(f"{max(run.w1 for run in bananas):.3f}")
        above = [run.w1 > run.w1_independent for run in bananas]
        assert sum(above) == {100: 0, 500: 2, 2000: 1, 16384: 1}[n]
    assert f"at most {', '.join(worst[:3])} and {worst[3]} sds" in SECTION.replace("\n", " ")


def test_the_exact_law_is_as_far_from_the_reference_as_readme_says(kept, targets):
    n = 16384
    independent = {run.target: run.w1_independent for run in kept if run.n == n}
    levels = (np.arange(n) + 0.5) / n
    normal = stats.norm.ppf(levels)
    rng = np.random.default_rng(5)
    second = rng.normal(size=2_000_000) ** 2 - 1 + 0.5 * rng.normal(size=2_000_000)
    scores = []
    for name, target in targets.items():
        exact = normal[:, None] * target.sd
        if name == "banana":
            exact[:, 1] = np.quantile(second, levels)
        scores.append(worst_w1(exact, target.unconstrained_draws) / independent[name])
    assert f"score {min(scores):.2f} to {max(scores):.2f}." in SECTION


def test_the_kept_table_is_that_of_the_kept_runs(kept):
    assert (RESULTS / "posteriors.md").read_text() == posteriors._table(kept) + "\n"
