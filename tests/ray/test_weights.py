"""Weights: state dicts, checkpoints, buffers, sums."""

from __future__ import annotations

import pytest
from support.libraries import need

need("msgspec")
need("optree")
need("torch")

import torch  # noqa: E402
from support.ray_local import local  # noqa: E402
from support.ray_torch import adam, net, on_each, same, state_of  # noqa: E402

from weft import errors  # noqa: E402
from weft.ray.weights import combine, sum_in_order  # noqa: E402


def test_state_dicts():
    with local(net, replicas=2, optimizer=adam) as deployment:
        policy, other = deployment.handle, net()
        policy(torch.randn(1, 3)).sum().backward()
        assert policy.load_state_dict(other.state_dict()) == 1
        assert same(policy.state_dict().values(), other.state_dict().values())
        assert same(state_of(deployment.replicas[0]), state_of(deployment.replicas[1]))
        x = torch.randn(2, 3)
        torch.testing.assert_close(policy(x), other(x))
        for bad in (
            {},
            {**other.state_dict(), "more": torch.ones(1)},
            dict.fromkeys(other.state_dict(), torch.ones(7)),
        ):
            with pytest.raises(errors.InvalidArgumentError):
                policy.load_state_dict(bad)
        with pytest.raises(errors.InvalidArgumentError, match="must be a tensor, got a ndarray"):
            policy.load_state_dict({key: x.numpy() for key, x in policy.state_dict().items()})
        with pytest.raises(errors.InvalidArgumentError):
            policy.load_state_dict([1])
        assert policy.version == 1


def test_checkpoints(tmp_path):
    path = tmp_path / "weights.pt"
    with local(net, optimizer=adam, checkpoint=str(path)) as deployment:
        policy = deployment.handle
        for _ in range(3):
            policy(torch.randn(4, 3)).square().sum().backward()
            policy.step()
        state = policy.state_dict()
        optimizer = deployment.keeper.weights.optimizer.state_dict()
    with local(net, replicas=2, optimizer=adam, checkpoint=str(path)) as deployment:
        assert same(state.values(), deployment.handle.state_dict().values())
        again = deployment.keeper.weights.optimizer.state_dict()
        assert torch.equal(again["state"][0]["exp_avg"], optimizer["state"][0]["exp_avg"])
        assert deployment.handle.step() == 4
    with (
        pytest.raises(errors.FailedPreconditionError, match="another model"),
        local(lambda: torch.nn.Linear(2, 2), optimizer=adam, checkpoint=str(path)),
    ):
        pass
    path.write_bytes(b"no checkpoint")
    with (
        pytest.raises(errors.FailedPreconditionError, match=r"weights\.pt cannot be read"),
        local(net, optimizer=adam, checkpoint=str(path)),
    ):
        pass


def test_batch_norm_is_combined_by_rows():
    def make():
        return torch.nn.BatchNorm1d(3)

    with local(make, replicas=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.0), max_batch_size=1000) as deployment:
        policy = deployment.handle
        policy._client.refresh()
        remotes = policy._client._table[0]
        twins = []
        for index, rows in ((0, 10), (1, 30)):
            x = torch.randn(rows, 3) + index
            twin = make()
            policy._client.choose = lambda *_, index=index: remotes[index]
            for _ in range(index + 1):
                policy(x)
                twin(x)
            twins.append((twin, rows * (index + 1)))
            assert deployment.replicas[index].rows == twins[index][1]  # counted before the batch's weights can change
        policy.step()
        total = sum(rows for _, rows in twins)
        for name in ("running_mean", "running_var"):
            wanted = sum(getattr(twin, name) * (rows / total) for twin, rows in twins)
            torch.testing.assert_close(policy.state_dict()[name], wanted)
        calls = sum(int(twin.num_batches_tracked) for twin, _ in twins)
        assert int(policy.state_dict()["num_batches_tracked"]) == calls
        assert same(state_of(deployment.replicas[0]), state_of(deployment.replicas[1]))


def test_a_buffer_that_the_module_replaces():
    class Counts(torch.nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x):
            self.calls = self.calls + 1  # another tensor
            return super().forward(x)

    with local(Counts, replicas=2, optimizer=adam) as deployment:
        policy = deployment.handle
        on_each(deployment, torch.randn(1, 3))
        calls = policy.statistics().batches
        policy.step()
        assert policy.state_dict()["calls"] == calls
        assert [replica.weights._module.calls for replica in deployment.replicas.values()] == [calls, calls]


def test_tied_weights():
    def make():
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    with local(make, replicas=2, optimizer=adam) as deployment:
        policy = deployment.handle
        policy(torch.randn(1, 3)).sum().backward()
        policy.step()
        state = policy.state_dict()
        assert torch.equal(state["0.weight"], state["1.weight"])
        make().load_state_dict(state)


def test_what_has_no_weights_makes_no_step():
    with local(lambda: abs) as deployment:
        for method in (deployment.handle.step, deployment.handle.state_dict):
            with pytest.raises(errors.FailedPreconditionError):
                method()
    with pytest.raises(errors.FailedPreconditionError, match="Module"), local(lambda: abs, optimizer=adam):
        pass


def test_sums_and_combinations():
    assert sum_in_order([None, None]) is None
    assert sum_in_order([None, torch.ones(2), torch.ones(2)]).tolist() == [2.0, 2.0]
    third = torch.tensor(1 / 3)
    assert combine(third, [third, third], [1, 2]).item() == third.item()
    assert combine(third, [torch.tensor(5.0)], [0]).item() == third.item()
    assert combine(torch.tensor(10), [torch.tensor(12), torch.tensor(15)], [1, 1]).item() == 17
    assert combine(torch.tensor(0.0), [torch.tensor(1.0), torch.tensor(5.0)], [3, 1]).item() == 2.0
