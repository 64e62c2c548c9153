"""What the tests of the kernels share."""

from __future__ import annotations

import pytest
from support.libraries import need


def pytest_generate_tests(metafunc):
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", _isas(), indirect=True)


def _isas():
    try:
        from weft import _native
    except ModuleNotFoundError:
        return ["none"]
    return _native.isas()


@pytest.fixture
def isa(request):
    """Each instruction set that this machine has."""
    need("weft._native")
    from weft import _native

    before = _native.isa()
    _native.force_isa(request.param)
    yield request.param
    _native.force_isa(before)
