"""Where weft and TensorFlow differ on purpose, as rules on programs of concurrent calls; docs/differences.md explains them."""

from __future__ import annotations

import json
from typing import Any

Program = dict[str, Any]
Outcome = dict[str, Any]


def refused(answer: dict[str, Any]) -> bool:
    """Whether a call was turned down at once."""
    return answer["status"] == "error" and answer["elapsed_s"] < 1e-6


class Excuses:
    """For each call that need not be answered alike, the rule that says so."""

    def __init__(self, program: Program, tf: Outcome, ours: Outcome) -> None:
        self.program = program
        self.calls = program["invocations"]
        self.tf, self.ours = tf["expect"], ours["expect"]
        self.attrs = [{**program["attrs"], **call.get("attrs", {})} for call in self.calls]
        self.found: dict[int, str] = {}
        rules = {
            "Batch": [self.creators],
            "BatchFunction": [self.creators, self.mixed_functions, self.busy_callers, self.adaptive_queues],
            "Unbatch": [self.unbatch],
            "UnbatchGrad": [self.unbatch_grad],
            "Pipeline": [],
        }
        for rule in rules[program["op"]]:
            rule()

    def resources(self) -> list[list[int]]:
        """The calls of each resource, in order."""
        places: dict[Any, list[int]] = {}
        for i, attrs in enumerate(self.attrs):
            place = attrs.get("container", ""), attrs.get("shared_name", "") or attrs.get("name", "")
            places.setdefault(place, []).append(i)
        return list(places.values())

    def excuse(self, calls: Any, rule: str) -> None:
        for i in calls:
            self.found.setdefault(i, rule)

    # Batch and BatchFunction

    MAKING = (
        "num_batch_threads",
        "max_batch_size",
        "batch_timeout_micros",
        "max_enqueued_batches",
        "allowed_batch_sizes",
        "enable_large_batch_splitting",
        "batch_padding_policy",
        "low_priority_max_batch_size",
    )

    def creators(self) -> None:
        """A refused call makes no resource here; there its parameters stay, even impossible ones. Negative sizes are refused."""
        for calls in self.resources():
            stuck: dict[str, Any] | None = None  # what TensorFlow may have kept of calls refused here
            for at, i in enumerate(calls):
                made = {key: self.attrs[i].get(key) for key in self.MAKING}
                if made["max_batch_size"] < 0 and refused(self.ours[i]):
                    self.excuse(calls[at:], "max_batch_size must be positive")
                if stuck is not None and stuck != made:
                    self.excuse(calls[at:], "a refused call leaves no trace")
                if i in self.found or not (refused(self.ours[i]) or self.is_impossible(made)):
                    break
                stuck = None if self.is_traceless(made) else made

    def is_impossible(self, made: dict[str, Any]) -> bool:
        """Whether no queue can have these limits."""
        most, enqueued, allowed = made["max_batch_size"], made["max_enqueued_batches"], made["allowed_batch_sizes"]
        is_adaptive = made["num_batch_threads"] <= 0
        splits = made["enable_large_batch_splitting"] or is_adaptive
        fits_none = splits and enqueued is not None and (enqueued == 0 or (is_adaptive and enqueued < 0))
        return bool(
            most <= 0 or made["batch_timeout_micros"] < 0 or fits_none or (splits and allowed and allowed[-1] > most)
        )

    def is_traceless(self, made: dict[str, Any]) -> bool:
        """Whether TensorFlow, too, forgets a call with these parameters."""
        allowed = made["allowed_batch_sizes"] or []
        splits = made["enable_large_batch_splitting"]
        is_wrong = allowed != sorted(set(allowed)) or (allowed and not splits and allowed[-1] != made["max_batch_size"])
        too_large = made["batch_timeout_micros"] >= 1 << 31
        return bool(is_wrong or too_large or (self.program["op"] == "Batch" and made["num_batch_threads"] <= 0))

    def mixed_functions(self) -> None:
        """Calls with different functions, captured tensors, numbers of inputs or output types do not meet here."""
        for calls in self.resources():
            queues: dict[str, set[str]] = {}
            for i in calls:
                call = self.calls[i]
                kind = [call.get("f"), call.get("captured_tensors"), len(call["in_tensors"]), self.attrs[i].get("Tout")]
                if not refused(self.ours[i]) or self.tf[i]["status"] != "error":
                    queues.setdefault(self.attrs[i].get("batching_queue", ""), set()).add(json.dumps(kind))
            if any(len(kinds) > 1 for kinds in queues.values()):
                self.excuse(calls, "batches are keyed by function and captured tensors")

    def busy_callers(self) -> None:
        """The callers run the batches here, and a caller one at a time: slow slices of one call follow each other."""
        is_split = [
            attrs.get("enable_large_batch_splitting") and attrs["num_batch_threads"] != 1 for attrs in self.attrs
        ]
        if "function_sleep_s" in self.program and any(is_split):
            self.excuse(range(len(self.calls)), "callers do the work, no thread is started")

    def adaptive_queues(self) -> None:
        """TensorFlow's adaptive scheduler keeps a full batch waiting while an older one of another queue is open."""
        for calls in self.resources():
            queues = {(self.attrs[i].get("batching_queue", ""), self.attrs[i]["num_batch_threads"] <= 0) for i in calls}
            if len(queues) > 1 and any(is_adaptive for _, is_adaptive in queues):
                self.excuse(calls, "a full batch does not wait for another queue")

    # Unbatch

    def unbatch(self) -> None:
        for calls in self.resources():
            creator_refused = refused(self.ours[calls[0]]) and self.tf[calls[0]].get("class") == "InvalidArgumentError"
            if creator_refused and len({self.attrs[i]["timeout_micros"] for i in calls}) > 1:
                self.excuse(calls[1:], "a refused call leaves no trace")
            for at, i in enumerate(calls):
                self.unbatch_call(i, calls[at + 1 :], calls)

    def unbatch_call(self, i: int, later: list[int], calls: list[int]) -> None:
        call, ours, tf = self.calls[i], self.ours[i], self.tf[i]
        rows = call["batch_index"]["values"] if call["batch_index"]["shape"][1] == 3 else []
        own = call["id"]["values"]
        listed = {id for id, _, _ in rows}
        length = call["batched_tensor"]["shape"][0]
        lies_outside = any(start + size > length for _, start, size in rows)
        if lies_outside and len(rows) <= length and sum(size for *_, size in rows) <= length and refused(ours):
            self.excuse([i], "a piece lies at its start within the data")
            self.excuse_ids(listed | {own}, calls, "a piece lies at its start within the data")
        if rows and "AlreadyExistsError" in (ours.get("class"), tf.get("class")):
            # TensorFlow keeps what it delivered so far, and a dead waiter that later fails others; or, where the call found its own
            # piece, it looked at nothing else.
            if tf["status"] == "ok" and own in self.stored_before(i, calls):
                self.excuse([i], "an owner that finds its piece still delivers the others")
            self.excuse_ids(listed, [*calls[: calls.index(i)]], "a refused call delivers nothing")
            self.excuse(later, "a refused call delivers nothing")
        if rows and tf["status"] == "ok" and own in self.stored_before(i, calls):
            self.excuse_ids(listed, later, "an owner that finds its piece still delivers the others")
        if not rows and refused(ours) and ours["class"] == "InvalidArgumentError":
            self.excuse_ids({own}, later, "a refused call changes nothing")

    def stored_before(self, i: int, calls: list[int]) -> set[int]:
        """Ids of which a piece may be waiting when call `i` comes."""
        found: set[int] = set()
        for j in calls[: calls.index(i)]:
            index = self.calls[j]["batch_index"]
            found |= {row[0] for row in index["values"]} if index["shape"][1] == 3 else set()
        return found

    def excuse_ids(self, ids: set[int], calls: list[int], rule: str) -> None:
        """Excuse the calls that concern these ids, and those that concern the ids they list."""
        ids = set(ids)
        for i in calls:
            index = self.calls[i]["batch_index"]
            listed = {row[0] for row in index["values"]} if index["shape"][1:] == [3] else set()
            own = self.calls[i]["id"]["values"]
            concerned = listed | {own if isinstance(own, int) else own[0]}
            if concerned & ids:
                self.excuse([i], rule)
                ids |= concerned

    # UnbatchGrad

    def unbatch_grad(self) -> None:
        for calls in self.resources():
            for at, i in enumerate(calls):
                call, ours, tf = self.calls[i], self.ours[i], self.tf[i]
                index = call["batch_index"]["values"]
                is_owner = call["original_input"]["shape"] and 0 not in call["original_input"]["shape"]
                if not is_owner:
                    continue
                listed = {row[0] for row in index} | {call["id"]["values"] if call["id"]["shape"] == [] else 0}
                if ours["status"] == "error" and tf["status"] == "ok":
                    if ours["class"] == "InvalidArgumentError" and self.rows_differ(index, calls):
                        self.excuse([i], "a gradient has the rows its length says")
                        self.excuse_ids(listed, calls[at + 1 :], "a gradient has the rows its length says")
                elif ours["status"] == "error":
                    rule = "a refused call changes nothing"
                    if tf["status"] == "hang" or ours["class"] == tf.get("class") == "InternalError":
                        self.excuse([i], "no owner waits for ever, nor for a batch that cannot be")
                    self.excuse_ids(listed, calls[at + 1 :], rule)

    def rows_differ(self, index: list[list[int]], calls: list[int]) -> bool:
        lengths = {id: length for id, _, length in index}
        return any(
            self.calls[i]["grad"]["shape"][0] != lengths.get(self.calls[i]["id"]["values"], -1)
            for i in calls
            if self.calls[i]["id"]["shape"] == [] and self.calls[i]["id"]["values"] in lengths
        )


def fails_in_part(program: Program, ours: Outcome) -> bool:
    """Whether the function may have failed for a slice of a call: TensorFlow then runs it no more for the rest, or aborts."""
    attrs = [call.get("attrs", {}) for call in program["invocations"]]
    is_split = any(a.get("enable_large_batch_splitting") or a.get("num_batch_threads", 1) <= 0 for a in attrs)
    failed = any(a["status"] == "error" for a in ours["expect"])
    return program.get("f") == "fail_if_any_ge5" and is_split and failed
