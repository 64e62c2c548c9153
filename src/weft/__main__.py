"""The command line: `python -m weft`, or `weft` where it is installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; what to exit with."""
    options = _parser().parse_args(argv)
    if find_spec("rich") is None:
        print("weft: the demo needs rich, which comes with the extra `demo`: pip install 'weft[demo]'", file=sys.stderr)
        return 2
    from .demo import Settings, run

    return run(Settings(options.callers, options.seconds, options.max_batch_size, options.timeout_ms))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "weft", description="Many concurrent calls drawn into one batch, and the gradient brought back out."
    )
    parser.add_argument("--version", action="version", version=f"weft {version('weft')}")
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
