"""Batched calls on an NVIDIA device: one forward, one backward, and no wait that stops the device."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from support.callers import start, together, until

import weft
from weft.errors import DeadlineExceededError, FailedPreconditionError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.cuda

CALLERS = 8


@pytest.fixture
def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double().cuda()


def inputs(callers=CALLERS):
    return [torch.randn(i % 3 + 1, 4, dtype=torch.float64, device="cuda", requires_grad=True) for i in range(callers)]


def expected(f, net, xs, head=lambda y: y):
    """The gradients of the parameters and of the inputs of one batch made by hand."""
    net.zero_grad()
    rows = [x.detach().clone().requires_grad_() for x in xs]
    out = f(torch.cat(rows))
    parts = head(out).split([len(x) for x in xs])
    sum((part * (i + 1)).sum() for i, part in enumerate(parts)).backward()
    found = [p.grad.clone() for p in net.parameters()], [x.grad for x in rows]
    net.zero_grad()
    return found


def make(f, xs, **options):
    rows = sum(map(len, xs))
    return weft.batched(f, max_batch_size=rows, min_batch_size=rows, max_wait=30.0, **options)


def check(net, xs, wanted):
    torch.cuda.synchronize()
    for p, g in zip(net.parameters(), wanted[0], strict=True):
        torch.testing.assert_close(p.grad, g)
    for x, g in zip(xs, wanted[1], strict=True):
        torch.testing.assert_close(x.grad, g)


def go_back(policy, xs, head=lambda y: y, around=lambda i: nullcontext()):
    """A call and a backward for each of `xs`, in threads."""

    def caller(i):
        with around(i):
            (head(policy(xs[i])) * (i + 1)).sum().backward()

    return together([lambda i=i: caller(i) for i in range(len(xs))])


def all_well(callers):
    for each in callers:
        if each.error is not None:
            raise each.error


class TestTheSharedBackward:
    @pytest.mark.parametrize("callers", [1, 2, 8, 64])
    def test_gradients_are_those_of_one_batch(self, net, callers):
        xs = inputs(callers)
        wanted = expected(net, net, xs)
        policy = make(net, xs)
        all_well(go_back(policy, xs))
        check(net, xs, wanted)
        assert policy.statistics().backwards == 1

    def test_the_graph_above_the_inputs(self, net):
        leaves = inputs()
        wanted = expected(lambda x: net(x * 2), net, leaves)
        policy = make(net, leaves)
        all_well(go_back(lambda x: policy(x * 2), leaves))
        check(net, leaves, wanted)

    def test_many_steps(self, net):
        xs = inputs()
        wanted = expected(net, net, xs)
        policy = make(net, xs)
        for _ in range(20):
            net.zero_grad()
            for x in xs:
                x.grad = None
            all_well(go_back(policy, xs))
            check(net, xs, wanted)

    def test_two_batches_at_once(self, net):
        xs = inputs(4)
        wanted = expected(lambda x: net(x) + net(x), net, xs)
        first, second = make(net, xs), make(net, xs)
        all_well(go_back(lambda x: first(x) + second(x), xs))
        check(net, xs, wanted)

    def test_a_batch_inside_a_batch(self, net):
        xs = inputs(4)
        inner = weft.batched(net)
        wanted = expected(lambda x: net(x) * 2, net, xs)
        all_well(go_back(make(lambda x: inner(x) * 2, xs), xs))
        check(net, xs, wanted)

    def test_inputs_in_host_memory_above(self, net):
        hosts = [x.detach().cpu().requires_grad_() for x in inputs(4)]
        wanted = expected(net, net, [x.detach().cuda().requires_grad_() for x in hosts])
        policy = make(net, hosts)
        all_well(go_back(lambda x: policy(x.cuda()), hosts))
        check(net, [], (wanted[0], []))
        for x, g in zip(hosts, wanted[1], strict=True):
            torch.testing.assert_close(x.grad, g.cpu())

    def test_autocast(self, net):
        xs = inputs()

        def autocast(i=0):
            return torch.autocast("cuda", dtype=torch.bfloat16)

        net.float()
        xs = [x.detach().float().requires_grad_() for x in xs]
        with autocast():
            wanted = expected(net, net, xs)
        all_well(go_back(make(net, xs), xs, around=autocast))
        torch.cuda.synchronize()
        for p, g in zip(net.parameters(), wanted[0], strict=True):
            torch.testing.assert_close(p.grad, g, rtol=2e-2, atol=2e-2)

    @pytest.mark.filterwarnings(
        "ignore:.*torch.jit.script_method:DeprecationWarning"
    )  # these two by the compiler itself
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
    def test_a_compiled_model(self, net):
        xs = inputs()
        wanted = expected(net, net, xs)
        compiled = torch.compile(net)
        compiled(torch.cat(xs)).sum().backward()
        net.zero_grad()
        for x in xs:
            x.grad = None
        all_well(go_back(make(compiled, xs), xs))
        torch.cuda.synchronize()
        for p, g in zip(net.parameters(), wanted[0], strict=True):
            torch.testing.assert_close(p.grad, g, rtol=1e-3, atol=1e-4)

    def test_distributed_data_parallel(self, net, tmp_path):
        import torch.distributed as dist

        xs = inputs()
        wanted = expected(net, net, xs)
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
        try:
            parallel = torch.nn.parallel.DistributedDataParallel(net)
            for _ in range(2):
                net.zero_grad()
                for x in xs:
                    x.grad = None
                all_well(go_back(make(parallel, xs), xs))
                check(net, xs, wanted)
        finally:
            dist.destroy_process_group()

    def test_without_multithreading(self, net):
        xs = inputs()
        wanted = expected(net, net, xs)
        policy = make(net, xs)
        all_well(go_back(policy, xs, around=lambda i: torch.autograd.set_multithreading_enabled(False)))
        check(net, xs, wanted)

    def test_callers_that_do_not_wait_settle_with_join(self, net):
        xs = inputs()
        wanted = expected(net, net, xs)
        policy = make(net, xs, wait_backward=False)
        all_well(go_back(policy, xs))
        policy.join()
        check(net, xs, wanted)
        assert policy.statistics().backwards == 1

    def test_one_backward_covers_several_callers(self, net):
        xs = inputs()
        wanted = expected(net, net, xs)
        policy = make(net, xs)
        ys = [each.end().value for each in together([lambda x=x: policy(x) for x in xs])]
        sum((y * (i + 1)).sum() for i, y in enumerate(ys)).backward()
        check(net, xs, wanted)

    def test_one_caller_may_change_its_rows(self, net):
        xs = inputs(2)
        policy = make(net, xs)

        def keeps(x):
            return (policy(x) ** 2).sum()

        def changes(x):
            return policy(x).mul_(2).sum()

        first, second = together([lambda: keeps(xs[0]), lambda: changes(xs[1])])
        for one in together([first.answer().backward, second.answer().backward]):
            one.answer()

    def test_raw_chain(self, net):
        from weft import raw_ops

        xs = inputs(3)
        wanted = expected(net, net, xs)
        attributes = {"num_batch_threads": 1, "max_batch_size": 6, "batch_timeout_micros": 30_000_000}

        def chain(x):
            made = raw_ops.Batch([x], grad_timeout_micros=20_000_000, **attributes)
            y = net(made.batched_tensors[0])
            return raw_ops.Unbatch(y, made.batch_index, made.id, timeout_micros=20_000_000)

        with weft.scope():
            all_well(go_back(chain, xs))
        check(net, xs, wanted)


class TestStreams:
    def test_callers_on_their_own_streams_share_a_batch(self, net):
        xs = inputs()
        wanted = expected(net, net, xs)
        streams = [torch.cuda.Stream() for _ in xs]
        torch.cuda.synchronize()
        policy = make(net, xs)
        for _ in range(10):
            net.zero_grad()
            for x in xs:
                x.grad = None
            torch.cuda.synchronize()
            all_well(go_back(policy, xs, around=lambda i: torch.cuda.stream(streams[i])))
            check(net, xs, wanted)
        assert policy.statistics().batches == 10

    def test_slow_rows_and_slow_losses_are_waited_for(self):
        """Each caller's stream is far behind its thread."""
        weight = torch.ones(1 << 20, device="cuda", requires_grad=True)
        xs = [torch.full((1, 1 << 20), float(i), device="cuda") for i in range(4)]
        policy = make(lambda x: x * weight, xs)
        streams = [torch.cuda.Stream() for _ in xs[1:]]
        torch.cuda.synchronize()

        def caller(i):
            with torch.cuda.stream(streams[i - 1]) if i else nullcontext():
                torch.cuda._sleep(50_000_000)
                y = policy(xs[i] + 1)
                torch.cuda._sleep(50_000_000)
                z = y * 2
                z.sum().backward()
                return z, weight.grad.clone(), torch.cuda.current_stream().synchronize()

        for i, each in enumerate(together([lambda i=i: caller(i) for i in range(4)])):
            z, gradient, _ = each.answer()
            torch.testing.assert_close(z, torch.full_like(z, (i + 1) * 2.0))
            torch.testing.assert_close(gradient, torch.full_like(gradient, 20.0))

    def test_join_waits_on_the_callers_stream(self):
        weight = torch.ones(1 << 20, device="cuda", requires_grad=True)
        policy = weft.batched(lambda x: x * weight, wait_backward=False)
        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            y = policy(torch.ones(1, 1 << 20, device="cuda"))
            torch.cuda._sleep(100_000_000)
            y.sum().backward()
        with torch.cuda.stream(other):
            policy.join()
            found = weight.grad * 3
            other.synchronize()
        torch.testing.assert_close(found, torch.full_like(found, 3.0))

    def test_the_ops_hand_over_between_streams(self):
        """Each caller's stream is far behind its thread."""
        from weft import raw_ops

        attributes = {"num_batch_threads": 1, "max_batch_size": 4, "batch_timeout_micros": 30_000_000}
        streams = [torch.cuda.Stream() for _ in range(3)]
        xs = [torch.full((1, 1 << 20), float(i), device="cuda", requires_grad=True) for i in range(4)]
        torch.cuda.synchronize()

        def caller(i):
            with torch.cuda.stream(streams[i - 1]) if i else nullcontext():
                torch.cuda._sleep(50_000_000)
                made = raw_ops.Batch([xs[i] + 1], grad_timeout_micros=20_000_000, **attributes)
                torch.cuda._sleep(50_000_000)
                y = made.batched_tensors[0] * 2
                z = raw_ops.Unbatch(y, made.batch_index, made.id, timeout_micros=20_000_000)
                torch.cuda._sleep(50_000_000)
                (z * (i + 1)).sum().backward()
                return z.detach().clone(), torch.cuda.current_stream().synchronize()

        with weft.scope():
            for i, each in enumerate(together([lambda i=i: caller(i) for i in range(4)])):
                z, _ = each.answer()
                torch.testing.assert_close(z, torch.full_like(z, (i + 1) * 2.0))
                torch.testing.assert_close(xs[i].grad, torch.full_like(xs[i], 2.0 * (i + 1)))

    def test_calls_on_different_devices_do_not_meet(self, net):
        host = torch.nn.Linear(4, 3).double()

        def either(x):
            return net(x) if x.is_cuda else host(x)

        policy = weft.batched(either, max_batch_size=2, min_batch_size=2, max_wait=0.05)

        def caller(device):
            with torch.no_grad():
                return policy(torch.ones(1, 4, dtype=torch.float64, device=device)).device.type

        running = {device: start(caller, device) for device in ("cpu", "cuda")}
        assert {device: call.answer() for device, call in running.items()} == {"cpu": "cpu", "cuda": "cuda"}
        assert policy.statistics().sizes == {1: 2}


class TestCheckpoints:
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_inside_the_model(self, net, reentrant):
        from torch.utils.checkpoint import checkpoint

        xs = inputs()
        wanted = expected(net, net, xs)
        policy = make(lambda x: checkpoint(net, x, use_reentrant=reentrant), xs)
        all_well(go_back(policy, xs))
        check(net, xs, wanted)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_around_the_callers_part(self, net, reentrant):
        from torch.utils.checkpoint import checkpoint

        xs = inputs()
        wanted = expected(net, net, xs, torch.tanh)
        policy = make(net, xs)
        all_well(go_back(policy, xs, lambda y: checkpoint(torch.tanh, y, use_reentrant=reentrant)))
        check(net, xs, wanted)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_a_call_in_a_checkpoint_is_refused_when_it_is_repeated(self, net, reentrant):
        """The checkpoint repeats the call in the device's thread, where nothing may wait."""
        from torch.utils.checkpoint import checkpoint

        xs = inputs(2)
        policy = make(net, xs)

        def caller(i):
            checkpoint(lambda x: policy(x * 1).tanh(), xs[i], use_reentrant=reentrant).sum().backward()

        for each in [start(caller, i) for i in range(2)]:
            with pytest.raises(FailedPreconditionError, match="one backward thread"):
                each.answer()
        net(xs[0]).sum().backward()  # the device's thread is free


class TestErrors:
    @pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
    def test_a_capture_is_refused(self, net):
        policy = weft.batched(net)
        x = torch.ones(2, 4, dtype=torch.float64, device="cuda")
        with torch.no_grad():
            policy(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(FailedPreconditionError, match="captured in a CUDA graph"), torch.cuda.graph(graph):
            policy(x)
        with torch.no_grad():
            assert policy(x).shape == (2, 3)

    def test_what_the_batchs_backward_raises_reaches_every_caller(self, net):
        class Broken(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1

            @staticmethod
            def backward(ctx, g):
                raise ZeroDivisionError("on purpose")

        xs = inputs(3)
        for each in go_back(make(lambda x: Broken.apply(net(x)), xs), xs):
            assert isinstance(each.error, ZeroDivisionError)
        wanted = expected(net, net, xs)
        for x in xs:
            x.grad = None
        all_well(go_back(make(net, xs), xs))
        check(net, xs, wanted)

    def test_a_gradient_that_does_not_come(self, net):
        xs = inputs(2)
        policy = make(net, xs, gradient_deadline=0.3)
        first, second = together([lambda x=x: policy(x) for x in xs])
        with pytest.raises(DeadlineExceededError, match="did not come within"):
            first.answer().sum().backward()
        with pytest.raises((DeadlineExceededError, FailedPreconditionError)):
            second.answer().sum().backward()

    def test_a_result_that_is_dropped(self, net):
        xs = inputs(2)
        policy = make(net, xs)
        callers = together([lambda x=x: policy(x) for x in xs])
        kept, callers[1].value = callers[0].value, None
        del callers
        with pytest.raises(FailedPreconditionError, match="dropped"):
            kept.sum().backward()

    def test_a_callers_own_loss_that_fails(self, net):
        class Broken(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1

            @staticmethod
            def backward(ctx, g):
                raise ZeroDivisionError("on purpose")

        xs = inputs(2)
        policy = make(net, xs)

        def caller(i):
            y = policy(xs[i])
            loss = (Broken.apply(y) if i else y).sum()
            del y
            loss.backward()

        good, bad = (start(caller, i) for i in range(2))
        with pytest.raises(ZeroDivisionError):
            bad.answer()
        bad.error = None  # its traceback holds the graph
        with pytest.raises(FailedPreconditionError):
            good.answer()

    def test_create_graph_and_a_second_backward_are_refused(self, net):
        policy = weft.batched(net)
        y = policy(torch.ones(1, 4, dtype=torch.float64, device="cuda"))
        with pytest.raises(FailedPreconditionError, match="create_graph"):
            y.sum().backward(create_graph=True)
        y.sum().backward()
        with pytest.raises(FailedPreconditionError, match="handed in already"):
            y.sum().backward()

    def test_nothing_is_left(self, net):
        xs = inputs()
        policy = make(net, xs)
        all_well(go_back(policy, xs))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            net.zero_grad()
            for x in xs:
                x.grad = None
            all_well(go_back(policy, xs))
        until(lambda: torch.cuda.memory_allocated() <= before + (1 << 16))
