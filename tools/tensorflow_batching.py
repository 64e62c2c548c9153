"""Plays cases of the batching family against a live TensorFlow, each in a fresh process: there it may abort or hang.

A case has the form of those in tests/recorded/batching.json. Its outcome says, for every invocation, what came back, in weft's
conventions: the third column of batch_index is a length, ids of Batch are the ordinals of their invocations, and the outputs
of a Batch without rows keep their trailing dimensions.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.replay_batching import FUNCTIONS, Answer, Player

#: How long the last invocation may go without an answer, in seconds; then its case hangs.
PATIENCE = 3.0
ABORTED = "process aborts (SIGABRT)"

Case = dict[str, Any]
Outcome = dict[str, Any]


# --- answers in weft's conventions ---


def plain(x: Any) -> Any:
    """A tensor of either library as a NumPy array, strings decoded."""
    x = np.asarray(x)
    if x.dtype.kind not in "OS":
        return x
    texts = [item.decode() if isinstance(item, bytes) else item for item in x.ravel().tolist()]
    return np.array(texts, object).reshape(x.shape)


def outputs(case: Case, i: int, value: Any, owners: dict[int, int]) -> Any:
    """The answer of invocation `i`; `owners` says which invocation has which id."""
    if case["op"] == "Batch":
        inputs = case["invocations"][i]["in_tensors"]
        index, tensors = value.batch_index.copy(), map(plain, value.batched_tensors)
        index[:, 0] = [owners[id] for id in index[:, 0].tolist()]
        return {
            "batched_tensors": [
                x if len(x) else x.reshape(0, *trailing(spec)) for x, spec in zip(tensors, inputs, strict=True)
            ],
            "batch_index": index,
            "id": np.array(i),
        }
    if isinstance(value, (list, tuple)):
        return list(map(plain, value))
    return plain(value)


def trailing(spec: dict[str, Any]) -> tuple[int, ...]:
    """All dimensions of a recorded tensor but the first."""
    return tuple(spec["shape"] if "shape" in spec else np.shape(spec["values"]))[1:]


def class_name(error: BaseException) -> str:
    """TensorFlow's name of the class of an error; of one of weft's own subclasses, that of the class above it."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return kinds[kinds.index("OpError") - 1] if "OpError" in kinds[1:] else kinds[0]


def outcome(case: Case, answers: list[Answer], batches: list[Any]) -> Outcome:
    """What every invocation got, and what the function saw."""
    values = [answer.value if answer.done and answer.error is None else None for answer in answers]
    owners = {int(v.id): i for i, v in enumerate(values) if hasattr(v, "batch_index") and np.size(v.id)}
    expect: list[Any] = []
    for i, answer in enumerate(answers):
        if not answer.done:
            expect.append({"status": "hang", "waited_s": PATIENCE})
        elif answer.error is not None:
            error = {"status": "error", "class": class_name(answer.error), "elapsed_s": answer.elapsed}
            expect.append({**error, "message": str(answer.error)})
        else:
            got = outputs(case, i, answer.value, owners)
            expect.append({"status": "ok", "outputs": got, "elapsed_s": answer.elapsed})
    return {"expect": expect, "batches_seen_by_f": batches}


# --- from TensorFlow's conventions, and back ---


def with_lengths(batch: Any) -> Any:
    """An answer of Batch with lengths in the index where TensorFlow has ends."""
    index = plain(batch.batch_index).reshape(-1, 3).copy()
    index[:, 2] -= index[:, 1]
    return batch._replace(batch_index=index)


def to_ends(arguments: dict[str, Any]) -> None:
    """Give the index the ends TensorFlow expects for lengths, and the data in the order in which it cuts: that of the index."""
    index = arguments.get("batch_index")
    if index is None or index.ndim < 2 or index.shape[1] != 3 or index.size != 3 * len(index):
        return
    index = index.reshape(-1, 3)
    data = arguments.get("batched_tensor")
    if data is not None and np.ndim(data) and len(index) and all(0 <= s <= s + n <= len(data) for _, s, n in index):
        starts = np.cumsum(index[:, 2]) - index[:, 2]
        if not (starts == index[:, 1]).all() and index[:, 2].sum() <= len(data):
            rows = [row for _, start, length in index.tolist() for row in range(start, start + length)]
            rest = [row for row in range(len(data)) if row not in rows]
            # Rows that two pieces share leave room for as many others: TensorFlow wants the data no shorter than the index.
            arguments["batched_tensor"] = data[(rows + rest + [0] * len(data))[: len(data)]]
            index = np.stack([index[:, 0], starts, index[:, 2]], axis=1)
    ends = np.stack([index[:, 0], index[:, 1], index[:, 1] + index[:, 2]], axis=1)
    arguments["batch_index"] = ends.reshape(arguments["batch_index"].shape)


def tensorflow_functions(tf: Any) -> dict[str, Callable[..., Any]]:
    """The functions of the recorded cases, for TensorFlow."""

    def fail_if_any_ge5(x: Any) -> Any:
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(x < 5), ["an element is 5 or more"])]):
            return tf.identity(x)

    return {
        "add100": lambda x: x + 100,
        "negate": lambda x: -x,
        "identity": tf.identity,
        "sum_all": tf.reduce_sum,
        "twice_the_rows": lambda x: tf.concat([x, x], 0),
        "identity_and_sum": lambda x: (tf.identity(x), tf.reduce_sum(x)),
        "fail_if_any_ge5": fail_if_any_ge5,
        "times0_plus_capture": lambda x, c: x * 0 + c,
        "two_args_add": lambda x, y: x + y,
        "double_and_join": lambda x, y: (2 * x, y + y),
        "square_ones": lambda x: tf.ones([tf.shape(x)[0], tf.shape(x)[0]], x.dtype),
    }


# --- playing ---


class LivePlayer(Player):
    """One case under way in TensorFlow."""

    def __init__(self, case: Case) -> None:
        import tensorflow as tf

        super().__init__(case, None)
        self.tf = tf
        self.raw_ops = tf.raw_ops
        self.warm_up()

    def warm_up(self) -> None:
        """Call the ops once, under a name of their own: the first time takes long."""
        x, index, where = np.zeros(1), np.array([[0, 0, 1]]), {"shared_name": "warm up"}
        limits = {"num_batch_threads": 1, "max_batch_size": 1, "batch_timeout_micros": 0, "grad_timeout_micros": 0}
        self.raw_ops.Batch(in_tensors=[x], **limits, **where)
        self.raw_ops.Unbatch(batched_tensor=x, batch_index=index, id=0, timeout_micros=0, **where)
        self.raw_ops.UnbatchGrad(original_input=x, batch_index=index, grad=x, id=0, **where)

    def arguments(self, invocation: dict[str, Any]) -> dict[str, Any]:
        arguments = super().arguments(invocation)
        to_ends(arguments)
        return arguments

    def call(self, invocation: dict[str, Any]) -> Any:
        value = super().call(invocation)
        return with_lengths(value) if self.case["op"] == "Batch" else value

    def watch(self, name: str, inputs: dict[str, Any]) -> Any:
        """The function, traced for these inputs, made to note its batches and to take its time."""
        given = [*inputs["in_tensors"], *inputs["captured_tensors"]]
        types = ["string" if x.dtype == object else x.dtype.name for x in given]
        count = FUNCTIONS[name].__code__.co_argcount
        types = (types + types[-1:] * count)[:count]
        if (name, *types) not in self.watched:
            self.watched[name, *types] = self.traced(name, types)
        return self.watched[name, *types]

    def traced(self, name: str, types: list[str]) -> Any:
        tf, body = self.tf, tensorflow_functions(self.tf)[name]

        def note(*args: Any) -> None:
            self.batches.append([plain(a).tolist() for a in args if np.ndim(a)])
            time.sleep(self.case.get("function_sleep_s", 0.0))

        def noted(*args: Any) -> Any:
            with tf.control_dependencies([tf.numpy_function(note, args, [])]):
                return body(*args)

        return tf.function(noted).get_concrete_function(*(tf.TensorSpec(None, t) for t in types))

    def play(self) -> Outcome:
        """Call, each invocation in a thread of its own, and wait for the answers."""
        if self.case["op"] == "BatchFunction":
            for invocation in self.case["invocations"]:
                self.arguments(invocation)  # traces the functions
        threads = []
        begun = time.monotonic()
        for i, invocation in enumerate(self.case["invocations"]):
            threads.append(threading.Thread(target=self.invoke, args=(i, invocation), daemon=True))
            if i and self.case["mode"] == "concurrent":
                begun += invocation.get("after_previous_s", self.case.get("gap_s") or 0.0)
                time.sleep(max(0.0, begun - time.monotonic()))
            threads[-1].start()
            if self.case["mode"] != "concurrent":
                threads[-1].join(PATIENCE)
        end = time.monotonic() + self.case.get("patience_s", PATIENCE)
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return outcome(self.case, self.answers, self.batches)


def _serve(connection: Any, player: Callable[[Case], Any], case: Case) -> None:
    """In the fresh process: play, send the outcome, and end without waiting for threads that hang."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        result = player(case).play()
    except BaseException as error:
        result = {"failure": repr(error)}
    connection.send(result)
    connection.close()
    os._exit(0)


class TensorFlow:
    """Runs cases in processes that are forked from one which has imported TensorFlow and done nothing else."""

    def __init__(self) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tensorflow", "replay_batching"])

    @property
    def version(self) -> str:
        """The version that is installed."""
        owners = packages_distributions()["tensorflow"]
        return version(min(owners, key=len))

    def play(self, case: Case, player: Callable[[Case], Any] = LivePlayer) -> Outcome:
        """The outcome of one case; `expect` is a text where the process aborted."""
        receive, send = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_serve, args=(send, player, case))
        process.start()
        send.close()
        try:
            result = receive.recv()
        except EOFError:
            process.join()
            if process.exitcode >= 0:
                raise RuntimeError(f"could not play {case.get('name', case)}: see above") from None
            killed = ABORTED if process.exitcode == -signal.SIGABRT else f"process ends with {process.exitcode}"
            return {"expect": killed, "batches_seen_by_f": []}
        process.join()
        if "failure" in result:
            raise RuntimeError(f"could not play {case.get('name', case)}: {result['failure']}")
        return result

    def play_all(
        self, cases: Iterable[Case], player: Callable[[Case], Any] = LivePlayer, jobs: int = 2
    ) -> Iterator[Outcome]:
        """The outcomes of many cases, in order, `jobs` at a time."""
        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(lambda case: self.play(case, player), cases)
