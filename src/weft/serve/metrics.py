"""`/metrics`: the figures of all models in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .model import Model

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
QUANTILES = (0.5, 0.9, 0.99)
#: The upper ends of the buckets of batch sizes.
SIZES = tuple(2**k for k in range(13))


def text(models: Mapping[str, Model], is_draining: bool) -> bytes:
    """Return the metrics as they are now."""
    lines = ["# HELP weft_draining Whether the server is shutting down.", "# TYPE weft_draining gauge"]
    lines.append(f"weft_draining {int(is_draining)}")
    figures = {name: (model, model.statistics()) for name, model in models.items()}
    for kind, name, about, samples in _families(figures):
        lines += [f"# HELP weft_{name} {about}", f"# TYPE weft_{name} {kind}"]
        lines += [f"weft_{sample}{{{_labels(labels)}}} {value}" for sample, labels, value in samples]
    return ("\n".join(lines) + "\n").encode()


Sample = tuple[str, dict[str, Any], float]


def _families(figures: Mapping[str, tuple[Model, Any]]) -> Iterator[tuple[str, str, str, list[Sample]]]:
    def each(name: str, value: Any, only_loaded: bool = True) -> list[Sample]:
        return [
            (name, {"model": key}, value(model, seen))
            for key, (model, seen) in figures.items()
            if seen is not None or not only_loaded
        ]

    yield "gauge", "ready", "Whether the model answers calls.", each("ready", lambda m, _: int(m.is_ready), False)
    yield (
        "gauge",
        "hanging",
        "Whether a batch runs for too long.",
        each("hanging", lambda m, _: int(m.is_hanging), False),
    )
    yield "gauge", "version", "The version that answers.", each("version", lambda m, _: m.version.number)
    yield (
        "gauge",
        "calls_in_server",
        "Calls that are being answered.",
        each("calls_in_server", lambda m, _: m.calls, False),
    )
    responses = [
        ("responses_total", {"model": key, "status": status}, float(count))
        for key, (model, _) in figures.items()
        for status, count in sorted(model.statuses.items())
    ]
    yield "counter", "responses_total", "Answers by HTTP status.", responses
    counters = {
        "calls": "Calls that ran, with a result or an error.",
        "rows": "Rows that ran.",
        "batches": "Batches that ran.",
        "padding": "Rows of padding.",
        "failed": "Calls that got an error of the model.",
        "rejected": "Calls refused before they joined a batch.",
        "late": "Calls whose deadline passed.",
    }
    for name, about in counters.items():
        samples = each(f"{name}_total", lambda _, seen, name=name: getattr(seen, name))
        yield "counter", f"{name}_total", about, samples
    yield "gauge", "waiting", "Calls that wait now.", each("waiting", lambda _, seen: seen.waiting)
    yield "gauge", "running", "Batches that run now.", each("running", lambda _, seen: seen.running)
    for name, about in (("wait", "From a call to the start of its batch."), ("run", "Of the model, for a batch.")):
        found: list[Sample] = []
        for key, (_, seen) in figures.items():
            if seen is not None:
                times = getattr(seen, f"{name}s")
                found += [(f"{name}_seconds", {"model": key, "quantile": q}, times.quantile(q)) for q in QUANTILES]
                found += [(f"{name}_seconds_sum", {"model": key}, times.total)]
                found += [(f"{name}_seconds_count", {"model": key}, times.count)]
        yield "summary", f"{name}_seconds", about, found
    yield (
        "histogram",
        "batch_rows",
        "Rows of a batch.",
        [s for key, (_, x) in figures.items() if x for s in _sizes(key, x)],
    )


def _sizes(model: str, statistics: Any) -> Iterator[Sample]:
    sizes: Mapping[int, int] = statistics.sizes
    for most in SIZES:
        yield "batch_rows_bucket", {"model": model, "le": most}, sum(n for size, n in sizes.items() if size <= most)
    yield "batch_rows_bucket", {"model": model, "le": "+Inf"}, statistics.batches
    yield "batch_rows_sum", {"model": model}, statistics.rows
    yield "batch_rows_count", {"model": model}, statistics.batches


def _labels(labels: Mapping[str, Any]) -> str:
    def escaped(value: Any) -> str:
        return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())
