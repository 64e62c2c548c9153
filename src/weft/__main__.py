"""The command line: `python -m weft`, or `weft` where it is installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec

from .cli.serve import add_arguments as add_serve_arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command given by the arguments; returns the exit status."""
    options = _parser().parse_args(argv)
    return int(options.run(options))


def _demo(options: argparse.Namespace) -> int:
    if find_spec("rich") is None:
        print("weft: the demo needs rich: pip install 'weft[demo]'", file=sys.stderr)
        return 2
    from .cli.demo import run

    return run(options.callers, options.seconds)


def _serve(options: argparse.Namespace) -> int:
    from .cli.serve import run

    return run(options)


def _version() -> str:
    from . import is_compiled

    try:
        from . import _native

        kernels = f"C++ kernels for {_native.isa()}"
    except ImportError:
        from .kernels.choice import WHY_NOT_NATIVE

        kernels = f"without C++ kernels ({WHY_NOT_NATIVE}): batch norm and ragged rows run as array arithmetic"
    return f"weft {version('weft')}, {'compiled' if is_compiled else 'pure Python'}, {kernels}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("weft", description="Many concurrent calls in one batch, with gradients.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", required=True)
    demo = commands.add_parser(
        "demo",
        help="show dynamic batching in the terminal",
        description="Many threads call one model: each for itself, through weft.batched, and by hand in one batch.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--callers", type=_at_least(2, int), default=32, metavar="N", help="number of calling threads")
    demo.add_argument("--seconds", type=_at_least(0.1, float), default=6.0, metavar="S", help="seconds of calls")
    demo.set_defaults(run=_demo)
    serve = commands.add_parser(
        "serve",
        usage="weft serve [OPTIONS] TARGET [TARGET ...]",
        help="serve models over HTTP",
        description="Serves functions made with weft.batched, or plain ones, over HTTP, with a page that shows their batches.",
    )
    add_serve_arguments(serve)
    serve.set_defaults(run=_serve)
    return parser


def _at_least(least: float, kind: type[int] | type[float]) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    number.__name__ = "number"  # for argparse's message "invalid number value"
    return number


if __name__ == "__main__":
    sys.exit(main())
