"""Writes the tree of docs/design.md: each room of src/weft, each file with the first sentence of its docstring.

Run it after adding, moving or renaming a file; `--check` only says whether the page is up to date.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "design.md"
SOURCE = ROOT / "src" / "weft"
BEGIN, END = "<!-- tools/design_tree.py writes this -->\n```text\n", "```\n<!-- to here -->\n"
#: Files at the top first, then the rooms in the order in which they import each other.
ORDER = ["errors", "core", "kernels", "ragged", "batching", "tensor_array", "norm"]
ORDER += ["raw_ops", "aio", "torch", "serve", "ray", "cli", "__main__"]


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.split("\n\n")[0].split())
    return first.split(". ")[0].removesuffix(".")


def tree() -> str:
    """The whole tree as text."""
    lines = []
    for entry in ORDER:
        room = SOURCE / entry
        if not room.is_dir():
            lines.append(f"{entry + '.py':<23} {sentence(room.with_suffix('.py'))}")
            continue
        lines.append(f"{entry + '/':<23} {sentence(room / '__init__.py')}")
        files = [path for path in sorted(room.rglob("*.py")) if path.name != "__init__.py"]
        lines += [f"  {path.relative_to(room).as_posix():<21} {sentence(path)}" for path in files]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page, or check it."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    wanted = before + BEGIN + tree() + END + after
    if "--check" not in sys.argv:
        PAGE.write_text(wanted, encoding="utf-8")
    elif page != wanted:
        sys.exit("docs/design.md is out of date: run tools/design_tree.py")


if __name__ == "__main__":
    main()
