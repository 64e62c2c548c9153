"""Steps: one update on all replicas or on none, versions, lost gradients."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.libraries import need

need("msgspec")
need("optree")
need("torch")

import torch  # noqa: E402
from support.ray_local import local  # noqa: E402
from support.ray_torch import adam, net, on_each, same, state_of  # noqa: E402

from weft import errors  # noqa: E402


def test_replicas_stay_the_same_bit_for_bit():
    with local(net, replicas=2, optimizer=adam) as deployment:
        policy = deployment.handle
        mine = net()
        assert same(state_of(deployment.replicas[0]), state_of(deployment.replicas[1]))
        mine.load_state_dict(policy.state_dict())
        optimizer = adam(mine.parameters())
        for version in range(1, 4):
            for x in torch.randn(8, 2, 3):
                policy(x).square().sum().backward()
                mine(x).square().sum().backward()
            assert policy.step() == version == policy.version
            optimizer.step()
            optimizer.zero_grad()
            assert same(state_of(deployment.replicas[0]), state_of(deployment.replicas[1]))
            for key, value in policy.state_dict().items():
                torch.testing.assert_close(value, mine.state_dict()[key])


def test_a_step_can_be_tried_again():
    with local(net, optimizer=adam) as deployment:
        policy = deployment.handle
        policy(torch.randn(2, 3)).sum().backward()
        assert policy.step(version=1) == 1
        before = policy.state_dict()
        assert policy.step(version=1) == 1
        assert same(before.values(), policy.state_dict().values())
        with pytest.raises(errors.FailedPreconditionError, match="version 2, and version 7"):
            policy.step(version=7)
        with pytest.raises(errors.InvalidArgumentError):
            policy.step(version="1")


def test_a_backward_of_older_weights_is_refused():
    with local(net, optimizer=adam) as deployment:
        policy = deployment.handle
        y = policy(torch.randn(2, 3))
        policy(torch.randn(2, 3)).sum().backward()
        policy.step()
        with pytest.raises(errors.FailedPreconditionError, match=r"version 0.* version 1"):
            y.sum().backward()
        _, receipt = policy.call(torch.randn(2, 3), receipt=True)
        assert receipt.version == 1


def test_a_step_waits_for_batches_that_hold_a_gradient():
    with local(net, optimizer=adam, max_wait=5.0, max_batch_size=2) as deployment, ThreadPoolExecutor(3) as threads:
        policy = deployment.handle
        first, second = threads.map(policy, torch.randn(2, 1, 3))
        backward = threads.submit(first.sum().backward)
        while not deployment.replicas[0].batcher._outstanding.backwards:
            pass
        step = threads.submit(policy.step)
        while deployment.replicas[0].step is None:
            pass
        second.sum().backward()
        backward.result(30)
        assert step.result(30) == 1
        assert policy.statistics().backwards == 1


def test_gradients_during_a_step_wait_for_its_end():
    with local(net, optimizer=adam) as deployment:
        policy, replica = deployment.handle, deployment.replicas[0]
        y = policy(torch.randn(1, 3))
        link = deployment.keeper.members[0].link
        link.wait(link.ask("prepare", 60.0))
        found = []

        def backward():
            try:
                y.sum().backward()
            except errors.FailedPreconditionError as error:
                found.append(str(error))

        thread = threading.Thread(target=backward)
        thread.start()
        while not replica.step.held:
            pass
        link.wait(link.ask("take_back"))
        thread.join(30)
        assert not found  # the step was not made, so the gradient counts
        assert replica.held_rows == 1


def test_a_result_that_comes_late_is_not_kept():
    """A batch's rows may reach their callers after a step has taken the batch's weights away."""
    with local(net, optimizer=adam) as deployment:
        policy = deployment.handle
        y = policy(torch.randn(1, 3))
        (connection,) = [each for each in deployment.replicas[0].server.connections if each.kept]
        kept = dict(connection.kept)
        policy.step()
        connection.kept |= kept
        with pytest.raises(errors.FailedPreconditionError, match=r"version 0.* version 1"):
            y.sum().backward()
        assert not connection.kept


def test_pull_backs_during_a_step():
    """The step waits for a batch whose other pull-back comes during the step."""

    def vjp(x):
        return x * 2, lambda g: g * 2

    options = {"vjp": vjp, "max_wait": 5.0, "max_batch_size": 2, "gradient_deadline": 20.0}
    with local(net, optimizer=adam, **options) as deployment, ThreadPoolExecutor(3) as threads:
        policy, replica = deployment.handle, deployment.replicas[0]
        (_, first), (_, second) = threads.map(policy.vjp, torch.randn(2, 1, 3))
        pulled = threads.submit(first, torch.ones(1, 3))
        while not replica.batcher._outstanding.backwards:
            pass
        step = threads.submit(policy.step)
        while replica.step is None:
            pass
        assert second(torch.ones(1, 3)).tolist() == pulled.result(10).tolist() == [[2.0] * 3]
        assert step.result(10) == 1


def test_steps_that_wait_keep_nobody_from_other_answers():
    with local(net, optimizer=adam) as deployment:
        policy = deployment.handle
        link = policy._client.keeper()
        with deployment.keeper._lock:
            steps = [link.ask("step", [1, False]) for _ in range(64)]
            assert policy.statistics().batches == 0
        for each in steps:
            link.wait(each)
        assert deployment.keeper.version == 1


def test_the_last_notice_of_a_replica_counts():
    """A replica dies while the thread that reads its notices is slow."""
    with local(net, replicas=2, optimizer=adam) as deployment, ThreadPoolExecutor(1) as threads:
        reads, goes_on = threading.Event(), threading.Event()
        link = deployment.keeper.members[1].link
        real = link.on_notice

        def slow(*given):
            reads.set()
            assert goes_on.wait(30)
            real(*given)

        link.on_notice = slow
        replica = deployment.replicas[1]
        replica.server.loop.call_soon_threadsafe(replica.hold, 3)
        assert reads.wait(30)
        deployment.kill(1)
        step = threads.submit(deployment.handle.step)
        while link.broken is None:
            pass
        goes_on.set()
        with pytest.raises(errors.UnavailableError, match="gradients of 3 rows are lost"):
            step.result(30)


def test_lost_gradients():
    with local(net, replicas=2, optimizer=adam) as deployment:
        policy = deployment.handle
        on_each(deployment, torch.randn(3, 3))
        rows = deployment.replicas[1].held_rows
        deployment.kill(1)
        before = policy.state_dict()
        with pytest.raises(errors.UnavailableError, match=f"gradients of {rows} rows are lost"):
            policy.step()
        assert same(before.values(), policy.state_dict().values())
        assert deployment.replicas[0].held_rows  # nothing has changed
        assert policy.step(allow_lost=True) == 1
        deployment.start(1)
        assert same(state_of(deployment.replicas[0]), state_of(deployment.replicas[1]))
        assert deployment.replicas[1].version == 1
        assert policy.step() == 2


def test_a_replica_that_dies_without_gradients_costs_nothing():
    with local(net, replicas=2, optimizer=adam) as deployment:
        deployment.kill(0)
        assert deployment.handle.step() == 1


def test_a_replica_that_does_not_take_the_weights_is_killed():
    with local(net, replicas=2, optimizer=adam) as deployment:

        async def refuse(*_):
            raise ValueError("no")

        deployment.replicas[1].ask_commit = refuse
        assert deployment.handle.step() == 1
        assert deployment.killed == [1]
        assert list(deployment.keeper.members) == [0]


def test_a_replica_that_hangs_is_killed():  # `listen`, with which the keeper watches, gives it up: see test_link
    with local(net, replicas=2, optimizer=adam) as deployment:
        killed = threading.Event()
        deployment.keeper._kill = lambda index: killed.set() if index == 1 else None
        deployment.keeper.members[1].link.give_up("it was silent")
        assert killed.wait(30)
        assert deployment.handle.step() == 1


def test_an_optimizer_that_raises_changes_nothing():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            raise ArithmeticError("broken")

    with local(net, replicas=2, optimizer=lambda p: Broken(p, lr=1.0)) as deployment:
        policy = deployment.handle
        before = policy.state_dict()
        on_each(deployment, torch.randn(2, 3))
        with pytest.raises(ArithmeticError, match="broken"):
            policy.step()
        assert same(before.values(), policy.state_dict().values())
        assert policy.version == 0
        assert all(replica.held_rows for replica in deployment.replicas.values())
        assert policy(torch.randn(1, 3)).shape == (1, 2)  # the replicas go on


def test_a_checkpoint_that_cannot_be_written_changes_nothing(tmp_path):
    place = tmp_path / "place"
    place.write_text("a file where the checkpoint's directory should be")
    with local(net, replicas=2, optimizer=adam, checkpoint=str(place / "weights.pt")) as deployment:
        policy = deployment.handle
        before = policy.state_dict()
        mine = net()
        mine.load_state_dict(before)
        x = torch.randn(2, 3)
        policy(x).square().sum().backward()
        mine(x).square().sum().backward()
        for change in (policy.step, lambda: policy.load_state_dict(net().state_dict())):
            with pytest.raises(OSError):
                change()
            assert same(before.values(), policy.state_dict().values())
            assert {replica.version for replica in deployment.replicas.values()} == {0}
        place.unlink()
        assert policy.step() == 1  # the gradient is there still, and counts once
        adam(mine.parameters()).step()
        for key, value in policy.state_dict().items():
            torch.testing.assert_close(value, mine.state_dict()[key])


def test_the_keeper_goes_while_a_batch_holds_up_its_step():
    entered, leave, orphaned = threading.Event(), threading.Event(), threading.Event()

    class Slow(torch.nn.Linear):
        def forward(self, x):
            entered.set()
            assert leave.wait(30)
            return super().forward(x)

    with local(lambda: Slow(3, 2), optimizer=adam) as deployment, ThreadPoolExecutor(2) as threads:
        policy, replica = deployment.handle, deployment.replicas[0]
        replica.on_orphaned = orphaned.set
        call = threads.submit(policy, torch.randn(1, 3))
        assert entered.wait(30)
        link = deployment.keeper.members[0].link
        link.ask("prepare", 60.0)
        while not replica.gate._is_closed:
            pass
        link.close()
        assert orphaned.wait(30)
        leave.set()
        assert call.result(30).shape == (1, 2)
        assert policy(torch.randn(1, 3)).shape == (1, 2)  # the gate is open again


def test_gradients_after_the_new_weights_are_not_forgotten():
    """They reach the keeper before the thread that makes the step has seen the answer."""
    with local(net, replicas=2, optimizer=adam) as deployment:
        replica = deployment.replicas[1]
        commit = replica.ask_commit

        async def commit_and_hold(*given):
            found = await commit(*given)
            replica.hold(3)
            return found

        replica.ask_commit = commit_and_hold
        assert deployment.handle.step() == 1
        assert deployment.keeper.members[1].held_rows == 3
        deployment.kill(1)
        with pytest.raises(errors.UnavailableError, match="gradients of 3 rows are lost"):
            deployment.handle.step()


def test_a_replica_that_refuses_the_weights_loses_what_the_step_has_not():
    with local(net, replicas=2, optimizer=adam) as deployment:
        replica = deployment.replicas[1]
        replica.server.loop.call_soon_threadsafe(replica.hold, 2)

        async def refuse(*_):
            replica.hold(7)
            raise ValueError("no")

        replica.ask_commit = refuse
        while deployment.keeper.members[1].held_rows != 2:
            pass
        assert deployment.handle.step() == 1
        assert deployment.keeper.lost_rows == 5


def test_a_replica_dies_after_it_took_the_weights():
    """The keeper has its notice that it holds nothing now, and no answer."""
    with local(net, replicas=2, optimizer=adam) as deployment:
        on_each(deployment, torch.randn(2, 3))
        replica = deployment.replicas[1]
        commit = replica.ask_commit

        async def commit_and_die(connection, *given):
            await commit(connection, *given)
            connection.close()

        replica.ask_commit = commit_and_die
        assert deployment.handle.step() == 1
        assert deployment.keeper.lost_rows == 0
        assert list(deployment.keeper.members) == [0]


def test_a_replica_dies_between_the_halves_of_a_step():
    deployed = []

    class Kills(torch.optim.SGD):
        def step(self, closure=None):
            if 1 in deployed[0].replicas:
                deployed[0].kill(1)
            return super().step(closure)

    with local(net, replicas=2, optimizer=lambda p: Kills(p, lr=0.1)) as deployment:
        deployed.append(deployment)
        policy = deployment.handle
        on_each(deployment, torch.randn(2, 3))
        assert policy.step() == 1  # its gradients are in the sum
        assert list(deployment.keeper.members) == [0]
        assert deployment.keeper.lost_rows == 0
        assert deployment.killed == [1]
        assert policy.step() == 2  # nothing is lost
        deployment.start(1)
        assert same(state_of(deployment.replicas[0]), state_of(deployment.replicas[1]))
        assert deployment.replicas[1].version == 2
