"""Settings and fixtures of all tests."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
from pathlib import Path

import hypothesis
import pytest

import weft

# `support` is found without this folder in sys.path, where `import ray` would find `tests/ray`.
_support = importlib.util.spec_from_file_location("support", Path(__file__).parent / "support" / "__init__.py")
sys.modules["support"] = importlib.util.module_from_spec(_support)
_support.loader.exec_module(sys.modules["support"])

from support.libraries import LIBRARIES, REQUIRED, need  # noqa: E402

# Programs in tests run once or twice, and JAX takes longer to compile than to run them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# CI draws the same examples every time: what it says is about the change it checks.
hypothesis.settings.register_profile(
    "many", deadline=None, print_blob=True, derandomize="CI" in os.environ, max_examples=400
)
hypothesis.settings.register_profile(
    "few", hypothesis.settings.get_profile("many"), max_examples=30, stateful_step_count=30
)


def pytest_configure(config):
    """Refuse to run without the libraries that WEFT_REQUIRE names: tests skip what is not installed.

    Properties are tested with few examples, and with many where slow tests are not left out.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # the tests run in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        raise pytest.UsageError(f"WEFT_REQUIRE names what is not installed: {', '.join(missing)}")
    hypothesis.settings.load_profile("few" if "not slow" in config.option.markexpr else "many")


@pytest.fixture(params=LIBRARIES)
def library(request):
    """The name of an array library, one after the other."""
    need(request.param)
    return request.param


@pytest.fixture
def scope():
    """A scope of the test's own, on the real clock."""
    with weft.scope() as scope:
        yield scope


@pytest.fixture
def clock():
    """A simulated clock, that of the test's scope."""
    clock = weft.SimulatedClock()
    with weft.scope(clock):
        yield clock


@pytest.fixture
def four_threads():
    """The kernels' threads are four."""
    need("weft._native")
    from weft import _native

    count = _native.num_threads()
    weft.set_num_threads(4)
    yield
    weft.set_num_threads(count)


@pytest.fixture
def little_garbage():
    """`gc.collect()` looks at what the test makes and at nothing older: all of torch and JAX takes it a second."""
    gc.freeze()
    yield
    gc.unfreeze()
