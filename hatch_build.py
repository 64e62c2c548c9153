"""Compiles the hot paths when a wheel is built: the same sources, by Cython, with the types that `.pxd` files give.

Where there is no C compiler the wheel is pure Python, and does the same. Editable installs are always: an edited source must not be
shadowed by what was compiled of an older one. WEFT_COMPILE=0 never compiles, WEFT_COMPILE=1 fails where it cannot.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = [
    "tensor_array/arguments.py",
    "core/arrays.py",
    "batching/async_calls.py",
    "batching/arguments.py",
    "batching/request.py",
    "batching/submit.py",
    "batching/run.py",
    "batching/batcher.py",
    "tensor_array/elements.py",
    "core/inputs.py",
    "batch_norm/function.py",
    "batch_norm/torch_function.py",
    "core/op.py",
    "core/scope.py",
    "tensor_array/blocks.py",
    "tensor_array/rules.py",
    "core/shapes.py",
    "batching/statistics.py",
    "tensor_array/storage.py",
    "batching/trees.py",
    "batching/torch.py",
    "core/adapters/torch.py",
    "aio.py",
    "core/_wakeup.pyx",
    "batching/tasks.py",
    "core/clock.py",
    "batching/batch_index.py",
    "batching/call.py",
    "batching/dispatcher.py",
    "batching/processing.py",
    "batching/workers.py",
    "batching/ids.py",
    "batching/interned.py",
    "batching/gradient.py",
    "core/named.py",
    "batching/queue.py",
    "batching/scheduler.py",
    "batching/rendezvous.py",
    "core/ticket.py",
    "kernels/_direct.pyx",
    "core/_small.pyx",
    "kernels/buffers.py",
    "kernels/choice.py",
    "kernels/cpu.py",
    "kernels/pool.py",
    "batching/attributes.py",
    "batching/ops.py",
    "batching/function_op.py",
    "batch_norm/ops.py",
    "batch_norm/derivatives.py",
    "tensor_array/ops.py",
]


class CompiledHotPath(BuildHookInterface):
    """Adds the compiled modules to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless the install is editable or nobody wants it."""
        wanted = os.environ.get("WEFT_COMPILE", "")
        if version == "editable" or wanted == "0":
            return
        self._folder = tempfile.mkdtemp()
        try:
            built = compile_into(Path(self._folder), Path(self.root))
        except BaseException as problem:  # setuptools ends the process where there is no compiler
            if wanted == "1" or isinstance(problem, KeyboardInterrupt):
                raise
            print(f"weft: not compiled, pure Python instead: {problem}", file=sys.stderr)
            return
        build_data["force_include"].update({str(path): name for path, name in built.items()})
        build_data.update(pure_python=False, infer_tag=True)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what is now in the wheel."""
        shutil.rmtree(getattr(self, "_folder", ""), ignore_errors=True)


def compile_into(folder: Path, root: Path) -> dict[Path, str]:
    """The compiled modules below `folder`, each with its place in the wheel."""
    import numpy
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    sources = folder / "src"
    shutil.copytree(root / "src", sources, ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    flags = [] if sys.platform == "win32" else ["-O2", "-g0"]
    extensions = [
        Extension(
            "weft." + source.rpartition(".")[0].replace("/", "."),
            [str(sources / "weft" / source)],
            include_dirs=[numpy.get_include()],
            define_macros=[("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION")],
            extra_compile_args=flags,
        )
        for source in SOURCES
    ]
    modules = cythonize(
        extensions,
        include_path=[str(sources)],
        language_level=3,
        quiet=True,
        compiler_directives={"annotation_typing": False, "binding": True},
    )
    command = Distribution({"ext_modules": modules}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(folder / "built"), str(folder / "objects")
    command.parallel = os.cpu_count()
    command.ensure_finalized()
    command.run()
    built = Path(command.build_lib)
    return {path: path.relative_to(built).as_posix() for path in built.rglob("*") if path.is_file()}
