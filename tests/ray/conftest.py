"""One Ray cluster for all tests that need one."""

from __future__ import annotations

import os

import pytest
from support.libraries import need


@pytest.fixture(scope="session")
def cluster():
    """A small Ray on this machine, in processes of its own."""
    need("ray")
    import ray

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False)
    yield ray
    ray.shutdown()
