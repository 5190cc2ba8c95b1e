"""What the scripts share at the command line: one-line errors, checked numbers, the output folder."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

__all__ = ["InputError", "Parser", "integer", "output_folder", "positive", "require", "run_script"]


class InputError(ValueError):
    """Something the caller gave is wrong: the message names it and says what was expected."""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line, with exit code 2."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def run_script(script: Callable[[Sequence[str] | None], None]) -> None:
    """Runs ``script(None)``; an ``InputError`` becomes one line on stderr and exit code 2."""
    try:
        script(None)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argparse type: a whole number of at least ``least`` (and at most ``most``)."""
    expected = f"a whole number of at least {least}"
    if most is not None:
        expected += f" and at most {most}"

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return number

    return parse


def positive(text: str) -> float:
    """An argparse type: a finite number above zero."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return number


def output_folder(path: str | Path) -> Path:
    """The folder, made where it does not exist."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--output must be a folder that can be written, got {folder} ({error.strerror})"
        ) from error
    if not os.access(folder, os.W_OK):
        raise InputError(f"--output must be a folder that can be written, got {folder}")
    return folder


def require(module: str) -> ModuleType:
    """The module of an optional package, or an ``InputError`` that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"the package {module} is needed: pip install 'jsvgd[experiments]' ({error})"
        ) from error
