"""Translates the Python modules of compiled_modules.txt to C, in one process: Cython takes longer to start than for a module.

    python tools/translate.py FOLDER

`batching/run.py` becomes `FOLDER/batching_run.c`. The build runs this.
"""

from __future__ import annotations

import sys
from pathlib import Path

from Cython.Compiler.Main import compile as translate
from Cython.Compiler.Options import get_directive_defaults

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"


def modules() -> list[str]:
    """The listed modules, as paths below src/weft."""
    lines = (ROOT / "compiled_modules.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def main(folder: Path) -> int:
    """Translate all modules; return the exit status."""
    directives = {**get_directive_defaults(), "annotation_typing": False, "binding": True, "auto_pickle": False}
    for module in modules():
        path = Path(module).with_suffix("")
        result = translate(
            str(SOURCE / "weft" / module),
            full_module_name=".".join(("weft", *path.parts)),
            include_path=[str(SOURCE)],
            output_file=str(folder / f"{'_'.join(path.parts)}.c"),
            compiler_directives=directives,
            language_level=3,
        )
        if result.num_errors:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
