"""The protocols of `weft serve` behind Ray Serve's proxy."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading

import pytest
from support.libraries import need

need("ray")
need("fastapi")  # a part of Ray Serve

import weft.ray  # noqa: E402
from weft import errors  # noqa: E402

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]

CODE = """
import json, sys, urllib.request
import numpy as np, ray, weft.ray
from ray import serve

def make():
    def double(x):
        return x * 2
    return double

ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
serve.start(http_options={"port": int(sys.argv[1])})
try:
    example = {"x": np.zeros((1, 3), np.float32)}
    serve.run(weft.ray.serve(make, name="double", example=example, serve_options={"num_replicas": 2}))
    body = {"inputs": [{"name": "x", "shape": [2, 3], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6]}]}
    where = f"http://127.0.0.1:{sys.argv[1]}"
    request = urllib.request.Request(where + "/v2/models/double/infer", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as reply:
        print(json.loads(reply.read())["outputs"][0]["data"])
    request = urllib.request.Request(where + "/v1/models/double:predict", json.dumps({"instances": [[1, 2, 3]]}).encode())
    with urllib.request.urlopen(request, timeout=30) as reply:
        print(json.loads(reply.read())["predictions"])
finally:
    serve.shutdown()
    ray.shutdown()
"""


def test_both_protocols_behind_the_proxy():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    found = subprocess.run(
        [sys.executable, "-c", CODE, str(port)], capture_output=True, text=True, timeout=150, env=environment
    )
    assert found.returncode == 0, found.stderr[-3000:]
    infer, predict = [line for line in found.stdout.splitlines() if line.startswith("[")]
    assert json.loads(infer) == [2, 4, 6, 8, 10, 12]
    assert json.loads(predict) == [[2, 4, 6]]


def test_misuse():
    with pytest.raises(errors.InvalidArgumentError, match="function without arguments"):
        weft.ray.serve(3)
    lock = threading.Lock()
    with pytest.raises(errors.InvalidArgumentError, match="picklable"):
        weft.ray.serve(lambda: lock)
