"""Children forked while threads of the parent work in torch; docs/batching.md says what torch itself makes hang in a child."""

from __future__ import annotations

import pytest
from support.callers import run_script

pytest.importorskip("torch")

FORKED = """
    import os, signal, sys, threading, time
    import numpy as np, torch, weft
    from weft import raw_ops

    forks = int(sys.argv[1])
    torch.set_num_threads(2)

    def model():
        return torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))

    policy = weft.batched(model(), max_batch_size=8, gradient_deadline=20.0)
    double = weft.batched(lambda x: x * 2)
    image, ones, none = torch.randn(8, 16, 16, 32), torch.ones(32), torch.empty(0)

    def learn():
        policy(torch.ones(1, 4)).sum().backward()

    def look():
        with torch.no_grad():
            policy(torch.ones(1, 4))

    def plain():
        torch.tanh(image)

    def normalize():
        raw_ops.FusedBatchNormV3(image, ones, ones, none, none)

    def count():
        double(np.ones((1, 4)))

    def repeat(work):
        while True:
            work()

    # What a first call imports and compiles is there before anyone forks.
    works = [learn, look, plain, normalize, count]
    first = [threading.Thread(target=work) for work in works]
    for thread in first:
        thread.start()
    for thread in first:
        thread.join()
    for work in works:
        threading.Thread(target=repeat, args=(work,), daemon=True).start()

    def child():
        torch.set_num_threads(1)  # the threads of torch's OpenMP have stayed behind
        assert double(np.full((1, 4), 3.0)).tolist() == [[6.0] * 4]
        raw_ops.FusedBatchNormV3(image.numpy(), ones.numpy(), ones.numpy(), none.numpy(), none.numpy())
        normalize()
        own = model()  # the parent's parameters may be locked for ever by a thread that stayed behind
        mine = weft.batched(own, max_batch_size=2, max_wait=15.0)

        def go_back():
            mine(torch.ones(1, 4)).sum().backward()

        callers = [threading.Thread(target=go_back, daemon=True) for _ in range(2)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(20)
        assert own[0].weight.grad is not None
        assert mine.statistics().backwards == 1

    for i in range(forks):
        time.sleep(0.01)
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(30)  # a child that hangs is killed, and counts as failed
                child()
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        assert status == 0, f"child {i} ended with {status}"
    print("well", flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("forks", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_children_forked_amid_torch_work(forks):
    assert run_script(FORKED, str(forks), patience=60 + 3 * forks).split() == ["well"]


WARNED = """
    import asyncio, os, sys, threading, warnings
    import numpy as np, torch, weft

    torch.set_num_threads(1)
    x = torch.ones(1, 2)

    def warned(work):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            work()
        return [(w.category.__name__, w.lineno, str(w.message)) for w in found]

    def in_child(work):
        pid = os.fork()
        if pid == 0:
            try:
                work()
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0

    def learn(policy):
        policy(x).sum().backward()  # the line of the call

    net = torch.nn.Linear(2, 1)
    policy = weft.batched(net, name="net")
"""


def forked(script):
    return run_script(WARNED + script)


class TestACopyOfTheParameters:
    def test_once_for_each_batcher_at_the_line_of_the_call(self):
        out = forked("""
    other = weft.batched(lambda x: net(x), name="other", wait_backward=False)
    line = learn.__code__.co_firstlineno + 1

    def child():
        for each in (policy, other):
            (found,) = warned(lambda: learn(each))
            assert found[:2] == ("RuntimeWarning", line), found
            assert f"the batcher {each.name} was made before this process was forked" in found[2]
            assert "weft.ray" in found[2]
            assert warned(lambda: learn(each)) == []
        in_child(lambda: print(len(warned(lambda: learn(policy)))))

    assert warned(lambda: learn(policy)) == []
    in_child(child)
    assert warned(lambda: learn(policy)) == []
    print("well", flush=True)
        """)
        assert out.split() == ["1", "well"]

    def test_calls_of_tasks_and_of_threads_that_share_a_batch(self):
        out = forked("""
    wide = weft.batched(net, max_batch_size=2, max_wait=30.0, name="wide")

    async def ask():
        (await policy.aio(x)).sum().backward()  # here
        await policy.aio.join()

    def both():
        threads = [threading.Thread(target=learn, args=(wide,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def child():
        (found,) = warned(lambda: asyncio.run(ask()))
        assert found[1] == ask.__code__.co_firstlineno + 1, found
        assert len(warned(both)) == 1
        assert warned(both) == []

    in_child(child)
    print("well", flush=True)
        """)
        assert out.split() == ["well"]

    def test_calls_that_train_no_copy(self):
        out = forked("""
    shared = torch.nn.Linear(2, 1)
    shared.share_memory()
    frozen = torch.nn.Linear(2, 1).requires_grad_(False)
    batchers = [weft.batched(shared), weft.batched(frozen), weft.batched(lambda x: x * 2)]
    arrays = weft.batched(lambda x: x * 2, vjp=lambda x: (x * 2, lambda g: g * 2))

    def child():
        with torch.no_grad():
            assert warned(lambda: policy(x)) == []
        for each in batchers:
            mine = torch.ones(1, 2, requires_grad=True)
            assert warned(lambda: each(mine).sum().backward()) == []
        assert warned(lambda: arrays.vjp(np.ones(1))[1](np.ones(1))) == []
        own = weft.batched(net)
        assert warned(lambda: learn(own)) == []
        inputs = torch.ones(1, 2, requires_grad=True)
        assert len(warned(lambda: policy(inputs).sum().backward())) == 1

    in_child(child)
    print("well", flush=True)
        """)
        assert out.split() == ["well"]

    def test_as_an_error(self):
        out = forked("""
    def child():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                learn(policy)
            except RuntimeWarning:
                pass
            else:
                raise AssertionError
        learn(policy)
        assert net.weight.grad is not None

    in_child(child)
    print("well", flush=True)
        """)
        assert out.split() == ["well"]
