"""Faults on a real Ray cluster: processes are killed by their id. Nothing hangs, nothing is answered or applied twice."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from support.libraries import need

need("ray")
need("torch")

import ray  # noqa: E402
import torch  # noqa: E402

import weft.ray  # noqa: E402
from weft import errors  # noqa: E402

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers do not see the tests

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]


class Slow(torch.nn.Module):
    """A model whose batches take a while, and that counts the rows it has seen."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 2)

    def forward(self, x):
        time.sleep(0.05)
        return self.inner(x)


def make_net():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def members(handle):
    """The replicas that the keeper knows: index -> pid."""
    return {index: pid for index, _, pid, _ in handle._client.ask_keeper("where")[0][1]}


def wait_for(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_replica_is_killed_in_the_middle_of_a_batch(cluster):
    with weft.ray.deploy(Slow, replicas=2, max_batch_size=8) as policy:
        pids = members(policy)
        answers, problems = [], []

        def client(i, with_gradients):
            for n in range(20):
                x = torch.full((1, 3), float(i))
                try:
                    with torch.set_grad_enabled(with_gradients):
                        answers.append((i, n, policy(x).detach()))
                except errors.UnavailableError:
                    problems.append(with_gradients)

        threads = [threading.Thread(target=client, args=(i, i % 4 == 0)) for i in range(16)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        os.kill(pids[0], signal.SIGKILL)
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert all(problems)  # only calls with gradients were lost
        assert len(answers) + len(problems) == 16 * 20
        assert len({(i, n) for i, n, _ in answers}) == len(answers)
        weights = policy.state_dict()
        for i, _, y in answers:
            wanted = torch.nn.functional.linear(
                torch.full((1, 3), float(i)), weights["inner.weight"], weights["inner.bias"]
            )
            torch.testing.assert_close(y, wanted)
        wait_for(lambda: len(members(policy)) == 2)  # Ray has started it again
        assert members(policy)[0] != pids[0]
        assert members(policy)[1] == pids[1]


def test_a_replica_that_holds_gradients_is_killed(cluster):
    with weft.ray.deploy(make_net, replicas=2, optimizer=sgd) as policy:
        while any(each.backwards == 0 for each in policy.statistics(per_replica=True)):
            policy(torch.ones(2, 3)).sum().backward()
        rows = 2 * policy.statistics(per_replica=True)[0].backwards
        before = policy.state_dict()
        os.kill(members(policy)[0], signal.SIGKILL)
        wait_for(lambda: len(members(policy)) < 2 or 0 not in members(policy))
        with pytest.raises(errors.UnavailableError, match=f"gradients of {rows} rows are lost"):
            policy.step()
        assert all(torch.equal(a, b) for a, b in zip(before.values(), policy.state_dict().values(), strict=True))
        assert policy.step(allow_lost=True) == 1
        after = policy.state_dict()
        wait_for(lambda: len(members(policy)) == 2)
        versions = set()
        for _ in range(40):
            y, receipt = policy.call(torch.ones(1, 3), receipt=True)
            versions.add(receipt.version)
            wanted = torch.nn.functional.linear(torch.ones(1, 3), after["weight"], after["bias"])
            torch.testing.assert_close(y.detach(), wanted)
            del y
        assert versions == {1}
        assert policy.step(version=1) == 1


CALLER = """
import os, pickle, sys, time, torch
policy = pickle.loads(bytes.fromhex(sys.argv[1]))
y = policy(torch.ones(1, 3))
print("called", flush=True)
time.sleep(600)
"""


def test_a_caller_is_killed_between_forward_and_backward(cluster):
    options = {"max_batch_size": 2, "max_wait": 20.0, "gradient_deadline": 30.0}
    with weft.ray.deploy(make_net, **options) as policy:
        caller = subprocess.Popen(
            [sys.executable, "-c", CALLER, pickle.dumps(policy).hex()], stdout=subprocess.PIPE, text=True
        )
        try:
            y = policy(torch.ones(1, 3))
            assert caller.stdout.readline() == "called\n"
            problem = []

            def backward():
                try:
                    y.sum().backward()
                except errors.OpError as error:
                    problem.append(error)

            thread = threading.Thread(target=backward)
            thread.start()
            began = time.monotonic()
            os.kill(caller.pid, signal.SIGKILL)
            thread.join(60)
            assert isinstance(problem[0], errors.FailedPreconditionError)
            assert time.monotonic() - began < 30
        finally:
            caller.kill()
            caller.wait(10)
            caller.stdout.close()
    with weft.ray.deploy(make_net, on_missing_gradient="zero", **options) as policy:
        caller = subprocess.Popen(
            [sys.executable, "-c", CALLER, pickle.dumps(policy).hex()], stdout=subprocess.PIPE, text=True
        )
        try:
            x = torch.ones(1, 3, requires_grad=True)
            y = policy(x)
            assert caller.stdout.readline() == "called\n"
            os.kill(caller.pid, signal.SIGKILL)
            y.sum().backward()  # the caller's rows count as zeros
            assert x.grad is not None
        finally:
            caller.kill()
            caller.wait(10)
            caller.stdout.close()


DRIVER = """
import os, pickle, sys, time, numpy as np, ray, weft.ray
ray.init(address=sys.argv[1], log_to_driver=False)
policy = weft.ray.deploy(lambda: np.tanh)
policy(np.ones((1, 1)))
print(pickle.dumps(policy).hex(), flush=True)
time.sleep(600)
"""


def test_the_driver_is_gone(cluster):
    address = cluster.get_runtime_context().gcs_address
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, address], stdout=subprocess.PIPE, text=True)
    try:
        policy = pickle.loads(bytes.fromhex(driver.stdout.readline()))
        np.testing.assert_allclose(policy(np.ones((1, 1))), np.tanh([[1.0]]))
        pids = members(policy)
        driver.kill()
        driver.wait(30)
        began = time.monotonic()
        problem = None
        while problem is None and time.monotonic() - began < 60:
            try:
                policy(np.ones((1, 1)))
            except (errors.UnavailableError, errors.CancelledError) as error:
                problem = error
        assert problem is not None
        wait_for(lambda: not os.path.exists(f"/proc/{pids[0]}"))
    finally:
        driver.kill()
        driver.wait(10)
        driver.stdout.close()


def test_the_keeper_is_killed(cluster):
    with weft.ray.deploy(make_net, optimizer=sgd) as policy:
        policy(torch.ones(1, 3)).sum().backward()
        keeper = cluster.get(_pid_of(policy), timeout=60)
        replica = members(policy)[0]
        os.kill(keeper, signal.SIGKILL)
        with pytest.raises(errors.UnavailableError):
            policy.step()
        wait_for(lambda: not os.path.exists(f"/proc/{replica}"))  # it would serve weights that nobody can change


def test_a_replica_that_the_keeper_has_left_is_started_again(cluster):
    """A connection that listens as the keeper's does is closed."""
    from weft.ray.connect import Peer
    from weft.ray.link import Link

    with weft.ray.deploy(make_net, optimizer=sgd) as policy:
        assert policy.step() == 1
        ((_, id, pid, addresses),) = policy._client.ask_keeper("where")[0][1]
        link = Link(Peer("the replica", id, addresses, policy._description.secret))
        link.wait(link.ask("listen"), time.monotonic() + 30)
        link.close()
        wait_for(lambda: members(policy).get(0, pid) != pid)
        _, receipt = policy.call(torch.ones(1, 3), receipt=True)
        assert receipt.version == 1


def test_a_replica_that_cannot_start_again_at_once_is_tried_again(cluster, tmp_path):
    starts = tmp_path / "starts"

    def make():
        with open(starts, "a") as file:
            file.write("x")
        if starts.stat().st_size == 2:
            raise RuntimeError("not now")
        return np.tanh

    with weft.ray.deploy(make) as policy:
        pid = members(policy)[0]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: members(policy).get(0, pid) != pid)
        np.testing.assert_allclose(policy(np.ones((1, 1))), np.tanh([[1.0]]))
        assert starts.stat().st_size == 3


def _pid_of(policy):
    from weft.ray.handle import keepers

    return keepers[policy._description.deployment].pid.remote()


def test_a_step_whose_caller_is_killed_is_made_once(cluster):
    code = """
import pickle, sys, torch
policy = pickle.loads(bytes.fromhex(sys.argv[1]))
link = policy._client.keeper()
link.ask("step", [1, False])  # nobody waits for the answer
print("asked", flush=True)
"""
    with weft.ray.deploy(make_net, optimizer=sgd) as policy:
        policy(torch.ones(1, 3)).sum().backward()
        subprocess.run(
            [sys.executable, "-c", code, pickle.dumps(policy).hex()], check=True, timeout=60, capture_output=True
        )
        assert policy.step(version=1) == 1
        mine = make_net()
        mine(torch.ones(1, 3)).sum().backward()
        sgd(mine.parameters()).step()
        assert torch.equal(policy.state_dict()["weight"], mine.weight)


def test_the_object_store_is_full(cluster):
    with weft.ray.deploy(make_net) as policy:
        held = []
        try:
            # Ray spills to disk; weft's calls do not need the store.
            held.extend(ray.put(np.zeros(10_000_000, np.uint8)) for _ in range(30))
            big = torch.randn(30, 3)
            for _ in range(20):
                y = policy(big)
                y.sum().backward()
        finally:
            del held


def test_a_node_is_lost():
    """A second raylet on this machine, with one of two replicas, is stopped."""
    code = """
import os, signal, sys, time, numpy as np, ray, weft.ray
from ray.cluster_utils import Cluster
head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100_000_000}
cluster = Cluster(initialize_head=True, head_node_args=head)
other = cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False)
try:
    policy = weft.ray.deploy(lambda: np.tanh, replicas=2, ray_options={"scheduling_strategy": "SPREAD"})
    for _ in range(20):
        policy(np.ones((1, 1)))
    cluster.remove_node(other, allow_graceful=False)
    began = time.monotonic()
    for _ in range(200):
        np.testing.assert_allclose(policy(np.ones((1, 1))), np.tanh([[1.0]]))
    assert time.monotonic() - began < 60
    print("answered", policy.statistics().calls > 0)
    policy.close()
finally:
    ray.shutdown()
    cluster.shutdown()
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert found.returncode == 0, found.stderr[-3000:]
    assert "answered True" in found.stdout
