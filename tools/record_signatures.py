"""Writes TensorFlow's signatures of the ops that weft has into tests/recorded/signatures.json.

Run it where TensorFlow is installed; what it prints is the version that answered.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from weft import raw_ops

RECORDED = Path(__file__).parents[1] / "tests" / "recorded" / "signatures.json"


def plain(default: Any) -> Any:
    """A default as JSON can hold it: a dtype by its name."""
    return default.name if isinstance(default, tf.DType) else default


def signature(name: str) -> dict[str, Any]:
    """An op's parameters, each with its default if it has one, and the names of its inputs and outputs."""
    parameters = inspect.signature(getattr(tf.raw_ops, name)).parameters.values()
    definition = op_def_registry.get(name)
    return {
        "parameters": [[p.name] if p.default is p.empty else [p.name, plain(p.default)] for p in parameters],
        "inputs": [argument.name for argument in definition.input_arg],
        "outputs": [argument.name for argument in definition.output_arg],
    }


def main() -> None:
    """Write the file."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(signature(name))}" for name in sorted(raw_ops.__all__))
    text = f'{{\n "tensorflow": {json.dumps(tf.__version__)},\n "ops": {{\n{lines}\n }}\n}}\n'
    RECORDED.write_text(text, encoding="utf-8")
    print(f"{len(raw_ops.__all__)} signatures of TensorFlow {tf.__version__} in {RECORDED}")


if __name__ == "__main__":
    main()
