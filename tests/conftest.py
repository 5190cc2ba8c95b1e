"""Where the reference data lie, and float64 for the tests that ask for it."""

import pathlib

import jax
import pytest

DATA = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def reference_data():
    if not DATA.is_dir():
        pytest.skip(f"the reference data are not beside the project ({DATA.name} folder absent)")
    return DATA
