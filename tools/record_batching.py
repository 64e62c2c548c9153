"""Records TensorFlow's answers for the batching family again: tests/recorded/batching.json, from its own inputs.

    python tools/record_batching.py --check            compare a live TensorFlow with the recorded answers
    python tools/record_batching.py --output FILE      write the answers of this TensorFlow

The cases' inputs, verdicts and notes are taken from the recorded file. Needs tensorflow-cpu and weft in the environment.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from tensorflow_batching import ABORTED, PATIENCE, Case, LivePlayer, Outcome, TensorFlow

RECORDED = Path(__file__).resolve().parent.parent / "tests" / "recorded" / "batching.json"


# --- tensors as JSON ---


def spec(x: np.ndarray) -> dict[str, Any]:
    """An array as the recorded file has it."""
    dtype = "string" if x.dtype == object else x.dtype.name
    return {"dtype": dtype, "shape": list(x.shape), "values": x.tolist() if x.size else []}


def as_json(value: Any) -> Any:
    """An outcome with its arrays as the recorded file has them, times in milliseconds."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items() if key != "message"}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if isinstance(value, np.ndarray):
        return spec(value)
    return round(value, 3) if isinstance(value, float) else value


def recorded_form(case: Case, outcome: Outcome) -> Case:
    """The case with what TensorFlow answered now."""
    new = {**case, "expect": as_json(outcome["expect"])}
    for answer in new["expect"] if isinstance(new["expect"], list) else []:
        if answer["status"] == "hang":
            answer["waited_s"] = round(PATIENCE)
    if "batches_seen_by_f" in case:
        new["batches_seen_by_f"] = outcome["batches_seen_by_f"]
    return new


# --- whole programs ---


class Pipeline(LivePlayer):
    """One of the recorded pipelines under way: what each caller does is written below under its name."""

    def __init__(self, recorded: dict[str, Any]) -> None:
        super().__init__({"invocations": recorded["callers"], "mode": "concurrent", "op": "", "attrs": {}})
        self.recorded = recorded
        self.attrs = recorded.get("attrs", {})

    def play(self) -> list[Any]:
        body = getattr(self, self.recorded["name"])
        threads = []
        for i, x in enumerate(self.recorded["callers"]):
            threads.append(threading.Thread(target=self.run, args=(i, body, x), daemon=True))
            threads[-1].start()
            time.sleep(self.recorded.get("gap_s", 0.0))
        for thread in threads:
            thread.join(PATIENCE)
        return [answer.value if answer.done else {"hang": PATIENCE} for answer in self.answers]

    def run(self, i: int, body: Any, x: Any) -> None:
        answer = self.answers[i]
        try:
            answer.value = body(x)
        except self.tf.errors.OpError as error:
            answer.value = {"error": type(error).__name__}
        answer.done = True

    def batch(self, x: Any, **attrs: Any) -> Any:
        return self.raw_ops.Batch(in_tensors=[self.tf.constant(x)], **{**self.attrs.get("Batch", {}), **attrs})

    def unbatch(self, y: Any, batch: Any, **attrs: Any) -> Any:
        attrs = {**self.attrs.get("Unbatch", {}), **attrs}
        return self.raw_ops.Unbatch(batched_tensor=y, batch_index=batch.batch_index, id=batch.id, **attrs)

    def pipeline_batch_add1_unbatch(self, x: Any) -> Any:
        b = self.batch(x)
        return self.unbatch(b.batched_tensors[0] + 1, b).numpy().tolist()

    def pipeline_two_unbatch_names(self, x: Any) -> Any:
        b = self.batch(x)
        (y,) = b.batched_tensors
        pairs = (y + 1, "u1"), (y * 10, "u2")
        return [self.unbatch(z, b, shared_name=name).numpy().tolist() for z, name in pairs]

    def pipeline_gradient_with_contrib_registration(self, x: Any) -> Any:
        b = self.batch(x)
        (y,) = b.batched_tensors
        z = self.unbatch(y * y, b)
        dy = self.raw_ops.UnbatchGrad(
            original_input=y,
            batch_index=b.batch_index,
            grad=self.tf.ones_like(z),
            id=b.id,
            shared_name="unbatch_gradient_unbatch",
        )
        timeout = self.attrs["Batch"]["grad_timeout_micros"]
        dx = self.unbatch(dy * 2 * y, b, timeout_micros=timeout, shared_name="batch_gradient_Batch_0")
        return dx.numpy().tolist()

    def pipeline_zero_rows_aborts(self, x: Any) -> Any:
        limits = {"num_batch_threads": 1, "max_batch_size": 8, "batch_timeout_micros": 1000, "grad_timeout_micros": 0}
        b = self.batch(np.zeros((0, 3)), **limits)
        return self.unbatch(b.batched_tensors[0], b, timeout_micros=400000).numpy().tolist()

    def unbatch_timeout_pipeline(self, x: Any) -> Any:
        limits = {"num_batch_threads": 1, "max_batch_size": 2, "batch_timeout_micros": 36000000}
        b = self.batch(x, **limits, grad_timeout_micros=0)
        y = b.batched_tensors[0] + 1
        if len(y):
            time.sleep(0.1)
        return self.unbatch(y, b, timeout_micros=10, shared_name="u").numpy().tolist()


def recorded_pipeline(recorded: dict[str, Any], outcome: Any) -> dict[str, Any]:
    """The pipeline with what its callers got now."""
    return {**recorded, "outputs": ABORTED if isinstance(outcome, dict) else outcome}


# --- comparing ---


def differences(old: Case, new: Case, outcome: Outcome) -> list[str]:
    """What differs between a recorded case and the same case now; times are compared loosely."""
    before, now = old["expect"], new["expect"]
    found = []
    if isinstance(before, str) or isinstance(now, str):
        return [] if before == now else [f"was {before}, is {now}"]
    late = 0.15 if "function_sleep_s" in old else 0.08
    for i, (a, b) in enumerate(zip(before, now, strict=True)):
        if abs(a.get("elapsed_s", 0) - b.get("elapsed_s", 0)) > late:
            found.append(f"invocation {i} took {b['elapsed_s']} s, not {a['elapsed_s']}")
        a, b = ({key: item for key, item in x.items() if key != "elapsed_s"} for x in (a, b))
        if a != b:
            found.append(f"invocation {i} was {json.dumps(a)}, is {json.dumps(b)}")
    if old.get("batches_seen_by_f") != new.get("batches_seen_by_f"):
        found.append(f"f saw {new.get('batches_seen_by_f')}, not {old.get('batches_seen_by_f')}")
    wanted = old.get("message_contains", "")
    if wanted and wanted not in outcome["expect"][0].get("message", ""):
        found.append(f"the message of invocation 0 lacks {wanted!r}")
    return found


def record(names: list[str], jobs: int) -> tuple[dict[str, Any], list[str]]:
    """The recorded file with all cases, or those named, made anew; and what differs from it."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    live = TensorFlow()
    found: list[str] = []
    made: dict[str, Any] = {}
    chosen = [case for case in recorded["cases"] if not names or case["name"] in names]
    for case, outcome in zip(chosen, live.play_all(chosen, jobs=jobs), strict=True):
        new = made[case["name"]] = recorded_form(case, outcome)
        found += [f"{case['name']}: {text}" for text in differences(case, new, outcome)]
    for pipeline in recorded["pipelines"]:
        if not names or pipeline["name"] in names:
            new = made[pipeline["name"]] = recorded_pipeline(pipeline, live.play(pipeline, Pipeline))
            if new != pipeline:
                was, now = json.dumps(pipeline["outputs"]), json.dumps(new["outputs"])
                found.append(f"{pipeline['name']}: was {was}, is {now}")
    print(f"TensorFlow {live.version}: {len(made)} cases and pipelines, {len(found)} differences from {RECORDED.name}")
    about = recorded["about"].replace(recorded["tf_version"], live.version)
    return {
        **recorded,
        "about": about,
        "tf_version": live.version,
        "cases": [made.get(case["name"], case) for case in recorded["cases"]],
        "pipelines": [made.get(case["name"], case) for case in recorded["pipelines"]],
    }, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the recorded file; status 1 if they differ")
    parser.add_argument("--output", type=Path, help="write the new file here")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these cases alone")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time (default: 2)")
    options = parser.parse_args()
    if not (options.check or options.output):
        parser.error("say --check, --output FILE, or both")
    made, found = record(options.only, options.jobs)
    if options.output:
        options.output.write_text(json.dumps(made, ensure_ascii=False) + "\n", encoding="utf-8")
    for text in found:
        print(f"    {text}")
    return int(bool(options.check and found))


if __name__ == "__main__":
    sys.exit(main())
