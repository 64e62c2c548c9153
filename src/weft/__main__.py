"""The command line: `python -m weft`, or `weft` where it is installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec

#: What there are CPU kernels for.
DTYPES = ["float32", "float64", "float16", "bfloat16"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; what to exit with."""
    options = _parser().parse_args(argv)
    return int(options.run(options))


def _warmup(options: argparse.Namespace) -> int:
    from .kernels import warmup

    if find_spec("numba") is None:
        print("weft: there is nothing to compile without Numba, which comes with the extra `cpu`", file=sys.stderr)
        return 2
    if unknown := sorted({*options.dtypes} - {*DTYPES}):
        print(f"weft: the kernels are for {', '.join(DTYPES)}, not for {', '.join(unknown)}", file=sys.stderr)
        return 2
    warmup(options.dtypes)
    return 0


def _demo(options: argparse.Namespace) -> int:
    if find_spec("rich") is None:
        print("weft: the demo needs rich, which comes with the extra `demo`: pip install 'weft[demo]'", file=sys.stderr)
        return 2
    from .cli.demo import Settings, run

    return run(Settings(options.callers, options.seconds, options.max_batch_size, options.timeout_ms))


def _version() -> str:
    from . import is_compiled

    try:
        from . import _native

        kernels = f"C++ kernels for {_native.isa()}"
    except ImportError:
        kernels = (
            "without C++ kernels (built without a compiler or with WEFT_PURE): batch norm runs as array arithmetic"
        )
    return f"weft {version('weft')}, {'compiled' if is_compiled else 'pure Python'}, {kernels}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "weft", description="Many concurrent calls drawn into one batch, and the gradient brought back out."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="the batching family at work, shown in the terminal",
        description="Many threads share the batches of one small model; every result and every gradient is checked.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--callers", type=_at_least(4, int), default=48, metavar="N", help="threads that call")
    demo.add_argument("--seconds", type=_at_least(0.1, float), default=6.0, metavar="S", help="how long")
    demo.add_argument(
        "--max-batch-size", type=_at_least(1, int), default=16, metavar="ROWS", help="rows of a full batch"
    )
    demo.add_argument("--timeout-ms", type=_at_least(0, float), default=5.0, metavar="MS", help="wait for more rows")
    demo.set_defaults(run=_demo)
    warmup = commands.add_parser(
        "warmup",
        help="compile the CPU kernels ahead of their first use",
        description="Compiles the CPU kernels for some dtypes; the result stays on disk.",
    )
    warmup.add_argument(
        "dtypes", nargs="*", default=DTYPES[:1], metavar="DTYPE", help=f"{', '.join(DTYPES)} (default: {DTYPES[0]})"
    )
    warmup.set_defaults(run=_warmup)
    return parser


def _at_least(least: float, kind: type[int] | type[float]) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    number.__name__ = "number"  # what argparse calls it in "invalid number value"
    return number


if __name__ == "__main__":
    sys.exit(main())
