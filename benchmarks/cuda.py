"""How fast is weft on an NVIDIA device, against cuDNN, PyTorch's own kernels, XLA, torch.compile, and what memory allows?

    python -m benchmarks.cuda                       # a few minutes; writes benchmarks/results/cuda.json
    python -m benchmarks.cuda --peers compile,xla   # also against torch.compile and XLA: these compile for minutes
    python -m benchmarks.cuda --plot                # draws the figures of cuda.json, without a device

Every kernel is checked before it is timed: fresh random inputs, outputs in memory that held NaN, a reference in float64. Times of
batch norm are those of the device: the median of replays of a CUDA graph, over so many inputs that none is in a cache. Other times
are of the host's clock, over many calls. A floor is the time in which a copy moves as many bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SHAPES = [
    ((256, 56, 56, 64), "float32"), ((128, 56, 56, 256), "float32"), ((256, 14, 14, 256), "float32"),
    ((256, 7, 7, 2048), "float32"), ((32, 56, 56, 64), "float32"), ((32, 14, 14, 256), "float32"),
    ((256, 56, 56, 64), "bfloat16"), ((256, 14, 14, 256), "bfloat16"), ((8, 8, 8, 32), "float32"),
]  # fmt: skip
EPSILON = 1e-3


# --- measuring ---


def replayed(calls: Sequence[Callable[[], Any]], repeats: int = 15) -> float:
    """The device's milliseconds for one of `calls`, from replays of a graph of all of them."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        calls[0]()
        calls[-1]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # XLA has threads of its own
        kept = [call() for call in calls]
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    del kept
    return statistics.median(times)


def called(call: Callable[[], Any], repeats: int = 200) -> float:
    """The milliseconds of a call in a loop, host and device together."""
    import torch

    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats // 5):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / (repeats // 5) * 1e3)
    return statistics.median(times)


def poison(elements: int, dtype: Any) -> None:
    """Fill free memory of the device with NaN: an element that a kernel does not write shows."""
    import torch

    held = [torch.full((elements,), math.nan, dtype=dtype, device="cuda") for _ in range(3)]
    del held


def copy_rate() -> float:
    """Bytes that a copy reads and writes in a millisecond."""
    import torch

    source = torch.empty(1 << 29, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / replayed([lambda: torch.mul(source, 1.0, out=target)])


# --- batch norm ---


def batch_norm_rows(peers: set[str]) -> list[dict[str, Any]]:
    """Each shape, channels last and first, forward and gradient."""
    rate, found = copy_rate(), []
    print(f"copy: {rate / 1e6:.0f} GB/s")
    for shape, dtype in SHAPES:
        for layout in ("last", "first"):
            found += batch_norm_row(shape, dtype, layout, peers, rate)
            for row in found[-2:]:
                print(line(row), flush=True)
    return found


def batch_norm_row(
    shape: tuple[int, ...], dtype: str, layout: str, peers: set[str], rate: float
) -> list[dict[str, Any]]:
    """The rows of a shape: ours, the peers' and the floors' milliseconds."""
    import torch

    from weft.kernels import cuda

    n, h, w, c = shape
    size = math.prod(shape) * (4 if dtype == "float32" else 2)
    count = max(6, min(24, math.ceil(3e8 / (2 * size))))  # one alone would be timed with the launch of its graph
    kind = getattr(torch, dtype)
    where = torch.channels_last if layout == "last" else torch.contiguous_format

    def fresh() -> Any:
        return (torch.randn((n, c, h, w), device="cuda") * 2 + 1).to(kind).contiguous(memory_format=where)

    xs, gs = [fresh() for _ in range(count)], [fresh() for _ in range(count)]
    scale, offset = torch.rand(c, device="cuda") + 0.5, torch.randn(c, device="cuda")
    mean, variance, error = checked(xs[0], gs[0], scale, offset)
    forward = {"weft": [lambda x=x: cuda.batch_norm(x, scale, offset, EPSILON, 1, None) for x in xs]}
    backward = {
        "weft": [
            lambda x=x, g=g: cuda.batch_norm_grad(g, x, scale, mean, variance, EPSILON, 1, None)
            for x, g in zip(xs, gs, strict=True)
        ]
    }
    add_torch(forward, backward, xs, gs, scale, offset)
    rows = []
    for name, calls, sweeps in (("forward", forward, (2, 3)), ("gradient", backward, (3, 5))):
        times = {who: replayed(each) for who, each in calls.items()}
        if "compile" in peers:
            times["torch.compile"] = compiled(name, xs, gs, scale, offset)
        if "xla" in peers and layout == "last":
            times["XLA"] = by_xla(name, shape, dtype)
        floors = [size * k / rate for k in sweeps]
        rows.append(
            {
                "name": f"{name} {'x'.join(map(str, shape))} {dtype} channels {layout}",
                "times": times,
                "megabytes": size / 1e6,
                "floors": floors,
                "error": error,
            }
        )
    return rows


def checked(x: Any, g: Any, scale: Any, offset: Any) -> tuple[Any, Any, float]:
    """The batch's statistics, and the largest relative error of our results against float64."""
    import torch

    from weft.kernels import cuda, reference

    wide = [v.double() for v in (x, scale, offset)]
    y, mean, variance = reference.batch_norm(*wide, EPSILON, 1, None)
    poison(x.numel(), x.dtype)
    got = cuda.batch_norm(x, scale, offset, EPSILON, 1, None)
    errors = [distance(a, b) for a, b in zip(got, (y, mean, variance), strict=True)]
    mean, variance = mean.float(), variance.float()
    right = reference.batch_norm_grad(g.double(), wide[0], wide[1], mean.double(), variance.double(), EPSILON, 1, None)
    poison(x.numel(), x.dtype)
    got = cuda.batch_norm_grad(g, x, scale, mean, variance, EPSILON, 1, None)
    errors += [distance(a, b) for a, b in zip(got, right, strict=True)]
    limit = 1e-5 if x.dtype == torch.float32 else 1e-2
    assert max(errors) < limit, f"wrong results: {errors}"
    return mean, variance, max(errors)


def distance(got: Any, right: Any) -> float:
    """The norm of the difference over the norm of what is right; infinite if it is not a number."""
    found = float((got.double() - right).norm() / right.norm())
    return found if found == found else math.inf


def add_torch(forward: Any, backward: Any, xs: Any, gs: Any, scale: Any, offset: Any) -> None:
    """Add cuDNN, where it takes the dtype, PyTorch's own kernels, and what `torch.nn.BatchNorm2d` takes."""
    import torch

    ops, running = torch.ops.aten, (torch.zeros_like(scale), torch.ones_like(scale))
    pairs = list(zip(xs, gs, strict=True))
    try:
        saved = ops.cudnn_batch_norm(xs[0], scale, offset, *running, True, 0.1, EPSILON)
        forward["cuDNN"] = [
            lambda x=x: ops.cudnn_batch_norm(x, scale, offset, *running, True, 0.1, EPSILON) for x in xs
        ]
        rest = (scale, *running, saved[1], saved[2], EPSILON, saved[3])
        backward["cuDNN"] = [lambda x=x, g=g: ops.cudnn_batch_norm_backward(x, g, *rest) for x, g in pairs]
    except RuntimeError:  # it takes no float32 vectors beside bfloat16
        pass
    own = ops.native_batch_norm(xs[0], scale, offset, *running, True, 0.1, EPSILON)
    forward["PyTorch"] = [lambda x=x: ops.native_batch_norm(x, scale, offset, *running, True, 0.1, EPSILON) for x in xs]
    last = (scale, *running, own[1], own[2], True, EPSILON, [True] * 3)
    backward["PyTorch"] = [lambda x=x, g=g: ops.native_batch_norm_backward(g, x, *last) for x, g in pairs]
    f = torch.nn.functional.batch_norm
    forward["BatchNorm2d"] = [lambda x=x: f(x, *running, scale, offset, True, 0.1, EPSILON) for x in xs]


def compiled(name: str, xs: Any, gs: Any, scale: Any, offset: Any) -> float:
    """The milliseconds of the same by torch.compile, for this shape alone."""
    import torch

    torch.compiler.reset()

    def forward(x: Any) -> Any:
        variance, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0, keepdim=True)
        spread = [v.reshape(1, -1, 1, 1) for v in (scale, offset)]
        return (
            ((x.float() - mean) * torch.rsqrt(variance + EPSILON) * spread[0] + spread[1]).to(x.dtype),
            mean,
            variance,
        )

    def gradient(x: Any, g: Any) -> Any:
        wide, slope = x.float(), g.float()
        variance, mean = (v.reshape(1, -1, 1, 1) for v in (offset.abs() + 0.5, offset))
        centred, r = wide - mean, torch.rsqrt(variance + EPSILON)
        of_g, of_gx = slope.sum((0, 2, 3), keepdim=True), (slope * centred).sum((0, 2, 3), keepdim=True)
        m = x.numel() / x.shape[1]
        dx = scale.reshape(1, -1, 1, 1) * r * (slope - of_g / m - centred * r * r * of_gx / m)
        return dx.to(x.dtype), (of_gx * r).reshape(-1), of_g.reshape(-1)

    if name == "forward":
        run = torch.compile(forward, dynamic=False)
        return replayed([lambda x=x: run(x) for x in xs])
    back = torch.compile(gradient, dynamic=False)
    return replayed([lambda x=x, g=g: back(x, g) for x, g in zip(xs, gs, strict=True)])


def by_xla(name: str, shape: tuple[int, ...], dtype: str) -> float:
    """The milliseconds of the same by XLA, with the arrays of one call in memory."""
    import jax
    import jax.numpy as jnp

    x, g = (jax.random.normal(jax.random.key(i), shape, jnp.float32).astype(dtype) for i in range(2))
    scale = jnp.ones(shape[-1])

    def forward(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        mean, variance = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
        return ((wide - mean) * jax.lax.rsqrt(variance + EPSILON) * scale).astype(x.dtype), mean, variance

    def gradient(x: Any, g: Any) -> Any:
        centred, slope = x.astype(jnp.float32) - scale, g.astype(jnp.float32)
        of_g, of_gx, m = slope.sum((0, 1, 2)), (slope * centred).sum((0, 1, 2)), x.size / x.shape[-1]
        return (scale * (slope - of_g / m - centred * of_gx / m)).astype(x.dtype), of_gx, of_g

    run = jax.jit(forward if name == "forward" else gradient)
    given = (x,) if name == "forward" else (x, g)
    jax.block_until_ready(run(*given))
    started = time.perf_counter()
    for _ in range(50):
        result = run(*given)
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / 50 * 1e3


# --- the host's part of small calls, rows, and callers ---


def small_rows() -> list[dict[str, Any]]:
    """A small batch norm through the op, the module and their peers, host and device together."""
    import torch

    import weft
    from weft import raw_ops

    x = torch.randn(8, 8, 8, 32, device="cuda")
    last = x.permute(0, 3, 1, 2)
    scale, offset, mean, variance = (torch.rand(32, device="cuda") + 0.5 for _ in range(4))
    theirs, ours = torch.nn.BatchNorm2d(32).cuda(), weft.torch.BatchNorm(32).cuda()
    f = torch.nn.functional.batch_norm
    op = {
        "weft": called(lambda: raw_ops.FusedBatchNormV3(x, scale, offset, mean, variance)),
        "BatchNorm2d": called(lambda: f(last, mean, variance, scale, offset, True)),
    }
    inference = {
        "weft": called(lambda: raw_ops.FusedBatchNormV3(x, scale, offset, mean, variance, is_training=False)),
        "BatchNorm2d": called(lambda: f(last, mean, variance, scale, offset, False)),
    }
    module = {"weft": called(lambda: ours(last)), "BatchNorm2d": called(lambda: theirs(last))}
    return [
        {"name": "op 8x8x8x32, host", "times": op},
        {"name": "op 8x8x8x32 inference, host", "times": inference},
        {"name": "module 8x8x8x32, host", "times": module},
    ]


def ragged_rows() -> list[dict[str, Any]]:
    """Rows padded, summed, gathered and normalized, against PyTorch's jagged operators and what one would write."""
    found = []
    for rows, longest, width in ((20000, 10, 1), (20000, 10, 64), (2000, 400, 64)):
        for name, times in ragged_case(rows, longest, width).items():
            found.append({"name": f"{name}, {rows} rows of 0 to {longest}, {width} wide", "times": times})
    return found


def ragged_case(rows: int, longest: int, width: int) -> dict[str, dict[str, float]]:
    """The milliseconds of each operation, ours and the peers'."""
    import numpy as np
    import torch

    from weft.kernels import best

    lengths = np.random.default_rng(0).integers(0, longest + 1, rows)
    order = np.random.default_rng(1).permutation(rows)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    starts, bounds = splits[order], np.concatenate([[0], np.cumsum(lengths[order])])
    for each in (splits, starts, bounds):  # as those of a RaggedTensor
        each.flags.writeable = False
    values = torch.randn(int(splits[-1]), width, device="cuda")
    flat = values[:, 0].contiguous() if width == 1 else values
    on_device = torch.from_numpy(splits.copy()).cuda()
    ids = torch.repeat_interleave(torch.arange(rows, device="cuda"), torch.from_numpy(lengths).cuda())
    index = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, lengths[order], strict=True)])
    at, padded = torch.from_numpy(index).cuda(), torch.randn((rows, longest, width), device="cuda")
    jagged, reduce = torch.ops.aten._jagged_to_padded_dense_forward, torch.segment_reduce
    nested = torch.nested.nested_tensor_from_jagged(values, on_device, min_seqlen=0, max_seqlen=longest)
    return {
        "pad": {
            "weft": called(lambda: best("pad_rows", flat)(flat, 0, splits, rows, longest)),
            "PyTorch jagged": called(lambda: jagged(values, [on_device], [longest], 0.0)),
            "torch.nested": called(lambda: torch.nested.to_padded_tensor(nested, 0.0)),
        },
        "sum": {
            "weft": called(lambda: best("row_sum", flat)(flat, splits)),
            "index_add": called(lambda: torch.zeros(rows, width, device="cuda").index_add_(0, ids, values)),
            "segment_reduce": called(lambda: reduce(values, "sum", offsets=on_device, axis=0)),
            "torch.nested": called(lambda: nested.sum(1)),
        },
        "max": {
            "weft": called(lambda: best("row_max", flat)(flat, splits)),
            "segment_reduce": called(lambda: reduce(values, "max", offsets=on_device, axis=0)),
            "torch.nested": called(lambda: nested.amax(1)),
        },
        "gather": {
            "weft": called(lambda: best("take_rows", flat)(flat, starts, bounds)),
            "index_select": called(lambda: values.index_select(0, at)),
        },
        "softmax": {
            "weft": called(lambda: best("row_softmax", flat)(flat, splits)),
            "softmax of padded rows": called(lambda: torch.softmax(padded, 1)),
            "torch.nested": called(lambda: nested.softmax(1)),
        },
    }


def caller_rows(callers: int = 64, width: int = 128) -> list[dict[str, Any]]:
    """A step of many threads with a small model: forward, and forward and backward."""
    import torch

    import weft

    net = torch.nn.Sequential(
        torch.nn.Linear(width, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, 256),
        torch.nn.ReLU(),
        torch.nn.Linear(256, width),
    ).cuda()
    rows = [torch.randn(1, width, device="cuda") for _ in range(callers)]
    leaves = [row.clone().requires_grad_() for row in rows]
    policy = weft.batched(net, max_batch_size=callers, max_wait=1.0)

    def crowd(calls: Sequence[Callable[[], Any]], steps: int = 20) -> float:
        gate = threading.Barrier(len(calls) + 1)

        def work(call: Callable[[], Any]) -> None:
            call()
            gate.wait()
            for _ in range(steps):
                call()

        threads = [threading.Thread(target=work, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        gate.wait()
        started = time.perf_counter()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / steps * 1e3

    def quiet(x: Any) -> None:
        with torch.no_grad():
            policy(x)

    def by_hand() -> None:
        net(torch.cat(rows)).square().sum().backward()

    hand, losses = called(by_hand), crowd([lambda x=x: x.square().sum().backward() for x in leaves])
    step = {
        "weft": crowd([lambda x=x: policy(x).square().sum().backward() for x in rows]),
        "by hand, and the losses in threads": hand + losses, "by hand": hand,
    }  # fmt: skip
    joined = torch.cat(rows)
    return [
        {"name": f"forward and backward, {callers} threads", "times": step},
        {"name": f"forward, {callers} threads", "times": {"weft": crowd([lambda x=x: quiet(x) for x in rows])}},
        {
            "name": f"join and cut {callers} rows of {width}",
            "times": {
                "weft": called(lambda: torch.unsafe_split_with_sizes(torch.cat(rows).clone(), [1] * callers)),
                "cat and slices": called(
                    lambda: [torch.cat(rows), [joined[i : i + 1].clone() for i in range(callers)]]
                ),
            },
        },
    ]


# --- what is printed and written ---


def line(row: dict[str, Any]) -> str:
    """A row: our time, the ratio of the best peer's to it, and of ours to the floors."""
    times = row["times"]
    peers = {who: t for who, t in times.items() if who != "weft"}
    text = f"{row['name']:<62} {times['weft']:.4f} ms"
    if peers:
        best = min(peers, key=peers.__getitem__)
        text += f"  {peers[best] / times['weft']:.2f} x {best} ({peers[best]:.4f})"
    if "floors" in row:
        text += "  over floors " + " / ".join(f"{times['weft'] / floor:.2f}" for floor in row["floors"])
    return text


def means(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The geometric means of the best peer's time over ours, by pass and layout."""
    found: dict[str, list[float]] = {}
    for row in rows:
        times = row["times"]
        kind, *_, layout = row["name"].split()
        found.setdefault(f"{kind}, channels {layout}", []).append(
            math.log(min(t for who, t in times.items() if who != "weft") / times["weft"])
        )
    return {name: math.exp(statistics.mean(logs)) for name, logs in found.items()}


def plot(results: dict[str, Any], path: Path) -> None:
    """A bar per row: the best peer's time over ours."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    rows = [row for row in results["rows"] if len(row["times"]) > 1]
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.24 * len(rows)))
    for at, row in enumerate(reversed(rows)):
        ratio = min(t for who, t in row["times"].items() if who != "weft") / row["times"]["weft"]
        axes.barh(at, ratio - 1, left=1, color="C0" if ratio >= 1 else "C1", height=0.8)
        axes.annotate(f" {ratio:.2f}x", (max(ratio, 1), at), va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [row["name"] for row in reversed(rows)], fontsize=7)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("the best peer's time over weft's: right of the line weft is faster")
    axes.set_title(results["device"], fontsize=10)
    axes.margins(x=0.15)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="", help="more peers of batch norm: compile, xla")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of cuda.json")
    parser.add_argument("--plot", action="store_true", help="only draw cuda.svg from cuda.json")
    options = parser.parse_args()
    path = options.out / "cuda.json"
    if not options.plot:
        import torch

        import weft

        started, norms = time.perf_counter(), batch_norm_rows(set(options.peers.split(",")))
        rows = [*norms, *small_rows(), *ragged_rows(), *caller_rows()]
        for row in rows[len(norms) :]:
            print(line(row))
        results = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "compiled": weft.is_compiled,
            "geometric means": means([row for row in norms if "8x8x8x32" not in row["name"]]), "rows": rows,
            "seconds": time.perf_counter() - started,
        }  # fmt: skip
        print(json.dumps(results["geometric means"], indent=1), f"{results['seconds']:.0f} s")
        path.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot:
        plot(json.loads(path.read_text()), path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
