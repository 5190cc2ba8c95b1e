"""Where the reference data lie, float64 for the tests that ask for it, and a bound on what is kept."""

import itertools
import pathlib
import signal

import jax
import pytest

DATA = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"


_finished = itertools.count(1)


@pytest.fixture(autouse=True)
def forget_compiled_programs():
    """Hundreds of tests compile thousands of programs, and XLA's CPU compiler has crashed beside them."""
    yield
    if next(_finished) % 40 == 0:
        jax.clear_caches()


@pytest.fixture
def little_optimized():
    """For scripts of which a test shows that they run: compiling is most of their time."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def reference_data():
    if not DATA.is_dir():
        pytest.skip(f"the reference data are not beside the project ({DATA.name} folder absent)")
    return DATA


@pytest.fixture
def ctrl_c():
    """SIGINT raises KeyboardInterrupt, also where a shell runs the tests in the background."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)
