"""Gradients of batched calls in torch: exact against one batch made by hand."""

from __future__ import annotations

import threading

import pytest
from support.batched_calls import FULL
from support.batched_losses import ROWS, SIZES, close, expected, go, inputs, loss, two_layers
from support.callers import PATIENCE, run_script, start, together

import weft

torch = pytest.importorskip("torch")


@pytest.fixture
def scope():
    with weft.scope() as scope:
        yield scope


@pytest.fixture
def net():
    return two_layers()


class TestExact:
    def test_one_backward_of_the_summed_losses(self, scope, net):
        xs = inputs()
        want = expected(net, xs)
        policy = weft.batched(net, max_batch_size=ROWS, **FULL)
        go(policy, xs)
        close(net, xs, want)
        seen = policy.statistics()
        assert (seen.sizes, seen.backwards) == ({ROWS: 1}, 1)

    def test_when_backward_returns_the_gradients_are_whole(self, scope, net):
        xs = inputs()
        want = expected(net, xs)
        policy = weft.batched(net, max_batch_size=ROWS, **FULL)

        def back(y, i):
            loss(y, i).backward()
            return [p.grad.clone() for p in net.parameters()]

        for seen in go(policy, xs, back):
            for grad, right in zip(seen, want[0], strict=True):
                torch.testing.assert_close(grad, right)

    def test_inputs_that_need_none(self, scope, net):
        xs = inputs(grad=False)
        want = expected(net, xs)
        go(weft.batched(net, max_batch_size=ROWS, **FULL), xs)
        close(net, xs, want)
        assert all(x.grad is None for x in xs)

    def test_inputs_that_were_computed(self, scope, net):
        leaves = inputs()
        want = expected(net, [x * 2 for x in leaves])
        policy = weft.batched(net, max_batch_size=ROWS, **FULL)
        callers = together([lambda x=x, i=i: loss(policy(x * 2), i).backward() for i, x in enumerate(leaves)])
        [caller.answer() for caller in callers]
        close(net, leaves, (want[0], [2 * grad for grad in want[1]]))

    def test_padding(self, scope, net):
        xs = inputs()
        want = expected(net, xs)
        go(weft.batched(net, max_batch_size=ROWS, allowed_batch_sizes=[16], **FULL), xs)
        close(net, xs, want)

    def test_split_calls(self, scope, net):
        xs = inputs([7, 4, 9])
        want = expected(net, xs)
        policy = weft.batched(net, max_batch_size=5, split=True, **FULL)
        go(policy, xs)
        close(net, xs, want)
        assert policy.statistics().backwards == 4

    def test_one_example_each(self, scope, net):
        xs = inputs([1] * 5)
        want = expected(net, xs)
        policy = weft.batched(net, rows=False, max_batch_size=5, **FULL)
        leaves = [x.detach()[0].requires_grad_() for x in xs]
        go(policy, leaves)
        close(net, leaves, (want[0], [grad[0] for grad in want[1]]))

    def test_numbers_beside_a_tensor_are_tensors(self, scope, net):
        x = torch.ones(4, dtype=torch.double, requires_grad=True)
        policy = weft.batched(lambda x, scale: x * scale[:, None], rows=False)
        policy(x, 3.0).sum().backward()
        assert x.grad.tolist() == [3.0] * 4

    def test_several_inputs_and_outputs_in_a_tree(self, scope, net):
        def f(a, *, b):
            h = net(a)
            return {"h": h, "both": (h[:, :1] * b, torch.arange(len(a)), b.detach() * 2)}

        def back(tree, i):
            assert not tree["both"][1].requires_grad
            assert not tree["both"][2].requires_grad
            (loss(tree["h"], i) + tree["both"][0].sum()).backward()

        xs, bs = inputs(), [torch.rand(n, 1, dtype=torch.double, requires_grad=True) for n in SIZES]
        rows = [x.detach().clone().requires_grad_() for x in (*xs, *bs)]
        h = net(torch.cat(rows[:4]))
        both = h[:, :1] * torch.cat(rows[4:])
        (sum(loss(y, i) for i, y in enumerate(h.split(SIZES))) + both.sum()).backward()
        want = [p.grad.clone() for p in net.parameters()], [x.grad for x in rows]
        net.zero_grad()
        policy = weft.batched(f, max_batch_size=ROWS, **FULL)
        callers = together([lambda i=i: back(policy(xs[i], b=bs[i]), i) for i in range(4)])
        [caller.answer() for caller in callers]
        close(net, [*xs, *bs], want)

    def test_outputs_of_which_only_some_are_used(self, scope, net):
        xs = inputs()
        want = expected(net, xs)
        policy = weft.batched(lambda x: (net(x), net(x) * 100), max_batch_size=ROWS, **FULL)
        go(policy, xs, lambda y, i: loss(y[0], i).backward())
        close(net, xs, want)

    def test_a_function_that_returns_its_input_or_a_view(self, scope):
        xs = inputs()
        policy = weft.batched(lambda x: (x, x[:, :1]), max_batch_size=ROWS, **FULL)
        go(policy, xs, lambda y, i: (y[0].sum() * (i + 1) + y[1].sum()).backward())
        for i, x in enumerate(xs):
            want = torch.full_like(x, i + 1.0)
            want[:, 0] += 1
            torch.testing.assert_close(x.grad, want)

    def test_batch_norm_in_training_mode(self, scope):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)).double()
        state = {k: v.clone() for k, v in net.state_dict().items()}
        xs = inputs()
        want = expected(net, xs)
        after = {k: v.clone() for k, v in net.state_dict().items()}
        net.load_state_dict(state)
        order = []

        def f(x):
            order.append(x.detach())
            return net(x)

        go(weft.batched(f, max_batch_size=ROWS, **FULL), xs)
        close(net, xs, want)
        for name, value in net.state_dict().items():
            torch.testing.assert_close(value, after[name])
        assert len(order) == 1

    @pytest.mark.parametrize("split", [False, True])
    def test_padding_enters_no_statistic_and_gets_no_gradient(self, scope, split):
        """A padded batch, told by its mask to weft's batch norm, is the batch without its padding."""
        torch.manual_seed(0)
        inward, norm, outward = torch.nn.Linear(4, 6), weft.torch.BatchNorm(6), torch.nn.Linear(6, 3)
        net = torch.nn.ModuleList([inward, norm, outward]).double()
        state = {k: v.clone() for k, v in net.state_dict().items()}
        xs = inputs()
        want = expected(net, xs, lambda x: outward(norm(inward(x))))
        after = {k: v.clone() for k, v in net.state_dict().items()}
        net.load_state_dict(state)

        def f(x, mask):
            assert len(x) == 16
            return outward(norm(inward(x), mask))

        policy = weft.batched(f, max_batch_size=ROWS, allowed_batch_sizes=[16], split=split, pass_mask="mask", **FULL)
        receipts = [
            caller.answer()
            for caller in together([lambda x=x, i=i: self.train(policy, x, i) for i, x in enumerate(xs)])
        ]
        close(net, xs, want)
        for name, value in net.state_dict().items():
            torch.testing.assert_close(value, after[name])
        assert {(r.size, r.padding) for r in receipts} == {(ROWS, 16 - ROWS)}
        assert sorted(r.position for r in receipts)[0] == 0

    @staticmethod
    def train(policy, x, i):
        y, receipt = policy.call(x, receipt=True)
        loss(y, i).backward()
        return receipt

    def test_a_call_in_several_padded_batches(self, scope, net):
        """Cut, padded, told by a mask, and joined again, with one backward for each batch."""
        xs = inputs([3, 9])
        want = expected(net, xs)
        policy = weft.batched(
            lambda x, there: net(x) * there[:, None],
            max_batch_size=4,
            allowed_batch_sizes=[4],
            split=True,
            pass_mask="there",
            **FULL,
        )
        together([lambda x=x, i=i: self.train(policy, x, i) for i, x in enumerate(xs)])
        close(net, xs, want)
        told = policy.statistics()
        assert (told.batches, told.backwards, told.calls, told.rows) == (3, 3, 2, 12)

    def test_several_rounds_accumulate_and_step(self, scope, net):
        xs = inputs()
        twin = torch.nn.Sequential(
            *[type(m)(*([m.in_features, m.out_features] if hasattr(m, "in_features") else [])) for m in net]
        )
        twin = twin.double()
        twin.load_state_dict(net.state_dict())
        mine, theirs = (torch.optim.SGD(m.parameters(), 0.01) for m in (net, twin))
        policy = weft.batched(net, max_batch_size=ROWS, **FULL)
        for _ in range(3):
            go(policy, [x.detach() for x in xs])
            mine.step()
            mine.zero_grad()
            rows = torch.cat([x.detach() for x in xs])
            sum(loss(y, i) for i, y in enumerate(twin(rows).split(SIZES))).backward()
            theirs.step()
            theirs.zero_grad()
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q)

    def test_complex_and_half_precision(self, scope):
        for dtype in (torch.complex128, torch.bfloat16):
            w = torch.ones(2, dtype=dtype, requires_grad=True)
            policy = weft.batched(lambda x, w=w: x * w, max_batch_size=2, **FULL)
            xs = [torch.full((1, 2), i + 1.0, dtype=dtype) for i in range(2)]
            go(policy, xs, lambda y, i: y.real.sum().backward())
            assert w.grad.real.tolist() == [3, 3]


class TestModes:
    def test_no_grad_records_nothing(self, scope, net):
        policy = weft.batched(net)
        with torch.no_grad():
            assert not policy(inputs([1])[0]).requires_grad
        assert policy(inputs([1])[0]).requires_grad

    def test_modes_do_not_meet(self, scope, net):
        policy = weft.batched(net, max_batch_size=2, max_wait=0.05)

        def without(x):
            with torch.no_grad():
                return policy(x)

        callers = together([lambda: policy(inputs([1])[0]), lambda: without(inputs([1])[0])])
        assert [c.answer().requires_grad for c in callers] == [True, False]
        assert policy.statistics().sizes == {1: 2}

    def test_autocast(self, scope, net):
        net = net.float()
        xs = [x.detach().float() for x in inputs()]

        def work(x, i):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = policy(x)
            assert y.dtype == torch.bfloat16
            loss(y.float(), i).backward()

        policy = weft.batched(net, max_batch_size=ROWS, **FULL)
        callers = together([lambda x=x, i=i: work(x, i) for i, x in enumerate(xs)])
        [caller.answer() for caller in callers]
        assert policy.statistics().sizes == {ROWS: 1}
        assert net[0].weight.grad.dtype == torch.float32

    def test_those_whose_input_needs_a_gradient_do_not_meet_the_others(self, scope, net):
        policy = weft.batched(net, max_batch_size=2, max_wait=0.05)
        xs = [inputs([1])[0], inputs([1], grad=False)[0]]
        go(policy, xs)
        assert xs[0].grad is not None
        assert policy.statistics().sizes == {1: 2}


def test_the_first_call_in_inference_mode_and_anomaly_mode_stops_nobody():
    """In a process of its own, where nothing was called before, and where callers that stop each other stop the interpreter."""
    script = """
        import threading, warnings
        import torch, weft

        double = weft.batched(lambda x: x * 2)
        with torch.inference_mode():
            assert double(torch.ones(2)).tolist() == [2, 2]
        x = torch.ones(2, requires_grad=True)
        double(x).sum().backward()
        assert x.grad.tolist() == [2, 2]

        warnings.simplefilter("ignore")
        net = torch.nn.Linear(2, 1)
        policy = weft.batched(net, max_batch_size=4, max_wait=10.0)

        def train():
            for _ in range(5):
                policy(torch.ones(1, 2)).sum().backward()

        torch.autograd.set_detect_anomaly(True)
        threads = [threading.Thread(target=train) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print(net.weight.grad.tolist())
    """
    assert run_script(script).strip() == "[[20.0, 20.0]]"


def test_many_callers_round_after_round(scope, net):
    """16 threads, batches as they come: the sum of all losses over all rounds."""
    xs = [[x.detach() for x in inputs([i % 3 + 1] * 10)] for i in range(16)]
    want = expected(net, [x for mine in xs for x in mine], None)
    net.zero_grad()
    for i, mine in enumerate(xs):
        for x in mine:
            (net(x) * (i + 1)).square().sum().backward()
    want = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    policy = weft.batched(net, max_batch_size=16)
    lock = threading.Lock()

    def work(i):
        for x in xs[i]:
            y = policy(x)
            (y * (i + 1)).square().sum().backward()
        with lock:
            return True

    callers = together([lambda i=i: work(i) for i in range(16)])
    assert all(c.answer() for c in callers)
    for p, grad in zip(net.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, grad)
    assert not policy._outstanding.backwards


def test_workers_have_the_number_of_threads_that_was_set(scope, monkeypatch):
    """PyTorch gives a thread the number of another thread when it is asked for it, not before."""
    asked = set()
    get = torch.get_num_threads
    monkeypatch.setattr(torch, "get_num_threads", lambda: (asked.add(threading.get_ident()), get())[1])
    ran = []
    policy = weft.batched(lambda x: (ran.append(threading.get_ident()), x)[1], max_batch_size=2, max_wait=PATIENCE)
    for caller in [start(policy, torch.ones(1, 1)) for _ in range(2)]:
        caller.answer()
    assert set(ran) <= asked
