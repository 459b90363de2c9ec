"""The fixture `cluster`: Ray with two hosts on this machine, each with a node store of its own; this process is the driver."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile

import pytest


@pytest.fixture(scope="session")
def cluster():
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed; make test-ray installs it; test_meeting tests how nodes meet without it")
    os.environ |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    import ray
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="hr-")  # short: Ray makes Unix sockets deep below
    store = 80 << 20
    os.makedirs("/tmp/ray", exist_ok=True)  # Ray writes there which cluster is the newest, and makes it elsewhere only
    made = Cluster()
    try:
        made.add_node(num_cpus=4, resources={"first": 100}, object_store_memory=store, temp_dir=folder)
        made.add_node(num_cpus=4, resources={"second": 100}, object_store_memory=store)
        ray.init(address=made.address, log_to_driver=False, namespace="tests")
        yield made
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()
        made.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
