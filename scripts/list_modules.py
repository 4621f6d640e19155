"""Write docs/modules.md, one line a module from its own docstring; with --check, say whether it is up to date."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "modules.md"
FOLDERS = {
    "python/sglang_xshare": "the package",
    "sgl-kernel/sgl_kernel": "kernels where no CUDA build loads",
    "benchmark": "what is measured",
    "scripts": "what make calls",
}


def list_modules() -> str:
    """The page: every tracked Python module below FOLDERS with the first sentence of its docstring."""
    lines = ["# Modules", "", "Made by `python -m scripts.list_modules` from the modules' docstrings.", ""]
    for folder, title in FOLDERS.items():
        tracked = subprocess.run(["git", "ls-files", f"{folder}/*.py"], cwd=ROOT, capture_output=True, text=True)
        lines += [f"## `{folder}`: {title}", "", "| module | |", "| --- | --- |"]
        for name in tracked.stdout.split():
            docstring = ast.get_docstring(ast.parse((ROOT / name).read_text())) or ""
            first_line = docstring.split("\n")[0].replace("|", "\\|")
            lines.append(f"| `{name.removeprefix(folder + '/')}` | {first_line} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    page = list_modules()
    if "--check" not in sys.argv:
        PAGE.write_text(page)
    elif page != PAGE.read_text():
        sys.exit("docs/modules.md is not up to date: python -m scripts.list_modules")
