"""`/metrics`: the figures of all models in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .models import Model

if TYPE_CHECKING:
    from .application import App

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
QUANTILES = (0.5, 0.9, 0.99)
#: The upper ends of the buckets of batch sizes.
SIZES = tuple(2**k for k in range(13))
#: Statistics of a batcher: those that only grow end with "_total".
_STATISTICS = {
    "calls_total": "Calls that ran, with a result or an error.",
    "rows_total": "Rows that ran.",
    "batches_total": "Batches that ran.",
    "padding_total": "Rows of padding.",
    "failed_total": "Calls that got an error of the model.",
    "rejected_total": "Calls refused before they joined a batch.",
    "late_total": "Calls whose deadline passed.",
    "waiting": "Calls that wait now.",
    "running": "Batches that run now.",
}


def text(app: App) -> bytes:
    """Return the metrics as they are now."""
    lines = ["# HELP weft_draining Whether the server is shutting down.", "# TYPE weft_draining gauge"]
    lines.append(f"weft_draining {int(app.is_leaving)}")
    figures = {name: (model, model.statistics()) for name, model in app.models.items()}
    counts = {"": app.statuses, **{name: model.statuses for name, model in app.models.items()}}
    responses: list[Sample] = [
        ("responses_total", {"model": name, "status": status}, float(count))
        for name, statuses in counts.items()
        for status, count in sorted(statuses.items())
    ]
    of_responses = (
        "counter",
        "responses_total",
        "Answers by HTTP status; those of no model have an empty name.",
        responses,
    )
    for kind, name, about, samples in [of_responses, *_families(figures)]:
        lines += [f"# HELP weft_{name} {about}", f"# TYPE weft_{name} {kind}"]
        lines += [f"weft_{sample}{{{_labels(labels)}}} {value}" for sample, labels, value in samples]
    return ("\n".join(lines) + "\n").encode()


Sample = tuple[str, dict[str, Any], float]


def _families(figures: Mapping[str, tuple[Model, Any]]) -> Iterator[tuple[str, str, str, list[Sample]]]:
    of_models: dict[str, tuple[str, Callable[[Model], int]]] = {
        "ready": ("Whether the model answers calls.", lambda model: int(model.is_ready)),
        "hanging": ("Whether a batch runs for too long.", lambda model: int(model.is_hanging)),
        "calls_in_server": ("Calls that are being answered.", lambda model: model.calls),
    }
    for name, (about, value) in of_models.items():
        yield "gauge", name, about, [(name, {"model": key}, value(model)) for key, (model, _) in figures.items()]
    samples: list[Sample] = [
        ("version", {"model": key}, model.version.number)
        for key, (model, _) in figures.items()
        if model.version is not None
    ]
    yield "gauge", "version", "The version that answers.", samples
    loaded = {key: seen for key, (_, seen) in figures.items() if seen is not None}
    for name, about in _STATISTICS.items():
        field = name.removesuffix("_total")
        kind = "gauge" if field == name else "counter"
        yield kind, name, about, [(name, {"model": key}, getattr(seen, field)) for key, seen in loaded.items()]
    for name, about in (("wait", "From a call to the start of its batch."), ("run", "Of the model, for a batch.")):
        samples = []
        for key, seen in loaded.items():
            times = getattr(seen, f"{name}s")
            samples += [(f"{name}_seconds", {"model": key, "quantile": q}, times.quantile(q)) for q in QUANTILES]
            samples.append((f"{name}_seconds_sum", {"model": key}, times.total))
            samples.append((f"{name}_seconds_count", {"model": key}, times.count))
        yield "summary", f"{name}_seconds", about, samples
    yield "histogram", "batch_rows", "Rows of a batch.", [s for key, seen in loaded.items() for s in _sizes(key, seen)]


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
