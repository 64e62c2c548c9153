"""Deployments on a real Ray cluster on this machine."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
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
    # Ray itself warns.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]


def make_net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture(scope="module")
def policy(cluster):
    with weft.ray.deploy(make_net, replicas=2, optimizer=sgd, max_batch_size=32) as found:
        yield found


def test_the_life_of_a_deployment(policy):
    mine = make_net()
    mine.load_state_dict(policy.state_dict())
    x = torch.randn(4, 3, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    y = policy(x)
    torch.testing.assert_close(y, mine(twin))
    y.square().sum().backward()
    mine(twin).square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)
    version = policy.version
    assert policy.step() == version + 1
    sgd(mine.parameters()).step()
    for key, value in policy.state_dict().items():
        torch.testing.assert_close(value, mine.state_dict()[key])
    _, receipt = policy.call(x, receipt=True)
    assert receipt.version == version + 1


def test_tasks_and_actors_of_ray_train_together(cluster, policy):
    @cluster.remote(num_cpus=0)
    def worker(handle, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(5):
            handle(torch.randn(2, 3, generator=generator)).square().sum().backward()
        return os.getpid()

    @cluster.remote(num_cpus=0)
    class Actor:
        def __init__(self, handle):
            self.handle = handle

        async def train(self):
            y = await self.handle.aio(torch.ones(2, 3))
            y.square().sum().backward()
            await self.handle.aio.join()
            return y.tolist()

    policy.step()
    mine = make_net()
    mine.load_state_dict(policy.state_dict())
    pids = cluster.get([worker.remote(policy, seed) for seed in range(3)], timeout=120)
    assert os.getpid() not in pids
    actor = Actor.remote(policy)
    found = cluster.get(actor.train.remote(), timeout=120)
    np.testing.assert_allclose(found, mine(torch.ones(2, 3)).detach(), rtol=1e-5)
    policy.step()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(5):
            mine(torch.randn(2, 3, generator=generator)).square().sum().backward()
    mine(torch.ones(2, 3)).square().sum().backward()
    sgd(mine.parameters()).step()
    for key, value in policy.state_dict().items():
        torch.testing.assert_close(value, mine.state_dict()[key])


def test_event_loops(policy):
    async def main():
        with torch.no_grad():
            return await asyncio.gather(*[policy.aio(torch.full((1, 3), float(i))) for i in range(32)])

    mine = make_net()
    mine.load_state_dict(policy.state_dict())
    for i, y in enumerate(asyncio.run(main())):
        torch.testing.assert_close(y, mine(torch.full((1, 3), float(i))).detach())


def test_statistics(policy):
    whole, each = policy.statistics(), policy.statistics(per_replica=True)
    assert len(each) == 2
    assert whole.calls == sum(one.calls for one in each)
    assert whole.waits.count == sum(one.waits.count for one in each)


PLAIN = """
import pickle, sys, torch
policy = pickle.loads(bytes.fromhex(sys.argv[1]))
x = torch.ones(1, 3, requires_grad=True)
policy(x).sum().backward()
print(x.grad.tolist(), "ray" in sys.modules)
"""


def test_a_process_without_ray(policy):
    code = subprocess.run(
        [sys.executable, "-c", PLAIN, pickle.dumps(policy).hex()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert code.stdout.endswith("False\n")


def test_a_forked_child_connects_again(policy):
    with torch.no_grad():
        wanted = policy(torch.ones(1, 3)).numpy()
    child = os.fork()
    if not child:
        with torch.no_grad():
            same = np.allclose(policy(torch.ones(1, 3)).numpy(), wanted)
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    with torch.no_grad():
        np.testing.assert_array_equal(policy(torch.ones(1, 3)).numpy(), wanted)


def test_numpy_functions_with_pull_backs(cluster):
    def pulled(x):
        y = np.tanh(x)
        return y, lambda dy: dy * (1 - y * y)

    with weft.ray.deploy(lambda: np.tanh, vjp=pulled, ray_options={"num_cpus": 0.5}) as tanh:
        y, pull_back = tanh.vjp(np.zeros((2, 1)))
        assert pull_back(np.ones_like(y)).tolist() == [[1.0], [1.0]]
    with pytest.raises(errors.CancelledError, match="is closed"):
        tanh(np.zeros((2, 1)))


def test_misuse(cluster):
    with pytest.raises(errors.InvalidArgumentError, match="function without arguments"):
        weft.ray.deploy(make_net())
    lock = __import__("threading").Lock()
    with pytest.raises(errors.InvalidArgumentError, match="picklable"):
        weft.ray.deploy(lambda: lock)
    with pytest.raises(errors.InvalidArgumentError, match="replicas"):
        weft.ray.deploy(make_net, replicas=0)
    with pytest.raises(TypeError):
        weft.ray.deploy(make_net, max_batch=3)

    def broken():
        raise RuntimeError("no weights here")

    with pytest.raises(errors.UnknownError, match="no weights here"):
        weft.ray.deploy(broken)
    with pytest.raises(errors.FailedPreconditionError, match=r"could not start.* must return a torch\.nn\.Module"):
        weft.ray.deploy(lambda: np.tanh, optimizer=sgd)
    with pytest.raises(errors.UnavailableError, match="did not start within"):
        weft.ray.deploy(make_net, ray_options={"num_cpus": 100}, start_timeout=1.0)


def test_ray_must_run():
    code = "import weft.ray\ntry:\n    weft.ray.deploy(lambda: abs)\nexcept RuntimeError as error:\n    print(error)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "ray.init()" in found.stdout


def addresses_of(handle):
    """Everywhere where a deployment listens."""
    found = list(handle._description.keeper)
    for _, _, _, addresses in handle._client.ask_keeper("where")[0][1]:
        found += addresses
    return found


def test_on_one_machine_nothing_listens_elsewhere(policy):
    found = addresses_of(policy)
    assert len(found) == 6
    for address in found:
        if isinstance(address, str):
            assert os.stat(os.path.dirname(address)).st_mode & 0o777 == 0o700
        else:
            assert address[0] == "127.0.0.1"


def test_other_machines(cluster, monkeypatch):
    from weft.ray import actors

    here = ray.util.get_node_ip_address()
    other = {"Alive": True, "NodeManagerAddress": "203.0.113.5"}
    assert [actors.host(network) for network in (None, True, False)] == ["127.0.0.1", here, "127.0.0.1"]
    monkeypatch.setattr(ray, "nodes", lambda: [other | {"NodeManagerAddress": here}, other | {"Alive": False}])
    assert actors.host(None) == "127.0.0.1"
    monkeypatch.setattr(ray, "nodes", lambda: [other | {"NodeManagerAddress": here}, other])
    assert [actors.host(network) for network in (None, True, False)] == [here, here, "127.0.0.1"]
    with weft.ray.deploy(lambda: np.tanh, network=True, ray_options={"num_cpus": 0.5}) as tanh:
        assert {address[0] for address in addresses_of(tanh) if not isinstance(address, str)} == {here}
        assert tanh(np.zeros((1, 1))).item() == 0.0
    with pytest.raises(errors.InvalidArgumentError, match="network must be True, False or None"):
        weft.ray.deploy(lambda: np.tanh, network="10.0.0.0/8")


def test_nothing_is_left_behind(cluster):
    handle = weft.ray.deploy(make_net)
    (pid,) = [member[2] for member in handle._client.ask_keeper("where")[0][1]]
    paths = [address for address in addresses_of(handle) if isinstance(address, str)]
    assert all(map(os.path.exists, paths))
    handle.close()
    assert not any(os.path.exists(os.path.dirname(path)) for path in paths)
    until = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.05)
        assert time.monotonic() < until
