"""Batched calls on an NVIDIA device: one forward, one backward, and no wait that stops the device."""

from __future__ import annotations

import pytest
from support.callers import start

import weft
from weft.errors import FailedPreconditionError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.cuda

CALLERS = 8


@pytest.fixture
def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).cuda()


def inputs():
    return [torch.randn(i % 3 + 1, 4, device="cuda", requires_grad=True) for i in range(CALLERS)]


def expected(net, xs):
    """The gradients of the parameters and of the inputs of one batch made by hand."""
    net.zero_grad()
    rows = [x.detach().clone().requires_grad_() for x in xs]
    out = net(torch.cat(rows))
    weights = torch.cat([torch.full((len(x), 1), i + 1.0, device="cuda") for i, x in enumerate(xs)])
    (out * weights).sum().backward()
    found = [p.grad.clone() for p in net.parameters()], [x.grad for x in rows]
    net.zero_grad()
    return found


def make(net, xs, **options):
    rows = sum(map(len, xs))
    return weft.batched(net.forward, max_batch_size=rows, max_wait=30.0, **options)


def check(net, xs, wanted):
    for p, g in zip(net.parameters(), wanted[0], strict=True):
        torch.testing.assert_close(p.grad, g)
    for x, g in zip(xs, wanted[1], strict=True):
        torch.testing.assert_close(x.grad, g)


def test_a_backward_that_waits_is_refused_in_the_forward(net):
    policy = weft.batched(net.forward)
    with pytest.raises(FailedPreconditionError, match="backward_in_caller"):
        policy(torch.ones(1, 4, device="cuda", requires_grad=True))
    with torch.no_grad():
        assert policy(torch.ones(2, 4, device="cuda")).shape == (2, 3)


def test_callers_that_do_not_wait_settle_with_join(net):
    xs = inputs()
    wanted = expected(net, xs)
    policy = make(net, xs, wait_backward=False)

    def caller(i):
        (policy(xs[i]) * (i + 1)).sum().backward()

    for running in [start(caller, i) for i in range(CALLERS)]:
        running.answer()
    policy.join()
    check(net, xs, wanted)
    assert policy.statistics().backwards == 1


def test_callers_wait_when_the_backward_runs_in_their_own_thread(net):
    xs = inputs()
    wanted = expected(net, xs)
    policy = make(net, xs)

    def caller(i):
        with weft.backward_in_caller():
            (policy(xs[i]) * (i + 1)).sum().backward()

    for running in [start(caller, i) for i in range(CALLERS)]:
        running.answer()
    check(net, xs, wanted)


def test_calls_on_different_devices_do_not_meet(net):
    host = torch.nn.Linear(4, 3)

    def either(x):
        return net(x) if x.is_cuda else host(x)

    policy = weft.batched(either, max_batch_size=2, min_batch_size=2, max_wait=0.05)

    def caller(device):
        with torch.no_grad():
            return policy(torch.ones(1, 4, device=device)).device.type

    running = {device: start(caller, device) for device in ("cpu", "cuda")}
    assert {device: call.answer() for device, call in running.items()} == {"cpu": "cpu", "cuda": "cuda"}
    assert policy.statistics().sizes == {1: 2}


def test_calls_on_different_streams_do_not_meet(net):
    policy = weft.batched(net.forward, max_batch_size=2, min_batch_size=2, max_wait=0.05)

    def caller(stream):
        with torch.no_grad(), torch.cuda.stream(stream):
            x = torch.ones(1, 4, device="cuda")
            return policy(x), net(x), torch.cuda.current_stream().synchronize()

    for running in [start(caller, torch.cuda.Stream()) for _ in range(2)]:
        y, wanted, _ = running.answer()
        torch.testing.assert_close(y, wanted)
    assert policy.statistics().sizes == {1: 2}
