"""The package's modules import each other in layers: never from a layer above, and never in a circle."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from benchmark.common.paths import ROOT

SOURCE = ROOT / "python" / "sglang_xshare"
LAYERS = (
    (
        *("policies.keys", "policies.exact", "types", "gpus", "version", "console", "parser", "files", "refusal"),
        "upstream.release",
    ),
    ("patching", "patching.*"),
    ("policies.plan",),
    ("policies", "policies.*", "selection", "selection.*"),
    ("upstream", "upstream.*"),  # what those above read of SGLang's code
    ("stage.exact", "stage.step", "stage.gather", "stage.handover", "stage.placement"),
    ("stage.record", "stage.record.*"),  # what is reported of a step
    ("stage", "stage.*"),  # what runs every step
    ("depth", "depth.*"),  # the policy of SGLang's drafts
    ("affinity", "affinity.*"),
    ("compatibility", "compatibility.*"),  # what runs once: flags, refusals, the layers of a loaded model
    ("live", "live.*"),
    ("start",),  # the stage around a loaded model
    ("hooks",),  # what the patches call
    ("check", "check.*", "tune", "tune.*"),
    ("cli", "__main__"),
    ("",),
)
"""From the lowest up. `name.*` stands for all modules below one, but for those that a longer name stands for. The last
is the package itself, which hands out its public names at their first use.
"""


def list_modules(source: Path = SOURCE) -> dict[str, Path]:
    """The file of every module, by its name below the package; "" is the package."""
    files = {file.relative_to(source).with_suffix(""): file for file in source.rglob("*.py")}
    return {".".join(path.parts).removesuffix("__init__").rstrip("."): file for path, file in files.items()}


def find_imports(name: str, file: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The package's modules that one imports, also inside functions and for type checking alone."""
    package = ["sglang_xshare", *name.split(".")] if name else ["sglang_xshare"]
    if file.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(file.read_text())):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            # `from package import module` imports the module, `from module import name` what holds the name.
            targets = [
                f"{origin}.{alias.name}" if below(f"{origin}.{alias.name}") in modules else origin
                for alias in node.names
            ]
        yield from (found for target in targets if (found := below(target)) in modules)


def below(target: str) -> str | None:
    """A module's name below the package; None for one of another package."""
    package, _, name = target.partition(".")
    return name if package == "sglang_xshare" else None


def find_layer(name: str) -> int:
    """The number of the layer that a module is in."""
    parts = name.split(".")
    spellings = [name, *(".".join([*parts[:length], "*"]) for length in range(len(parts) - 1, -1, -1))]
    spelling = next((spelling for spelling in spellings if any(spelling in layer for layer in LAYERS)), None)
    assert spelling is not None, f"{name} is in no layer"
    return next(number for number, layer in enumerate(LAYERS) if spelling in layer)


def read_graph(source: Path = SOURCE) -> dict[str, set[str]]:
    """What every module imports of the package."""
    modules = list_modules(source)
    return {name: set(find_imports(name, file, modules)) for name, file in modules.items()}


@pytest.fixture(scope="module")
def graph():
    return read_graph()


def test_nothing_imports_from_a_higher_layer(graph):
    upward = [
        f"{name} imports {target}"
        for name, targets in graph.items()
        for target in targets
        if find_layer(target) > find_layer(name)
    ]
    assert upward == []


def test_no_modules_import_each_other_in_a_circle(graph):
    TopologicalSorter(graph).prepare()  # raises CycleError, which names them


def test_every_layer_is_there_and_found(graph):
    """A table that names what is not there, or imports that are overlooked, would forbid nothing."""
    assert {name.removesuffix(".*") for layer in LAYERS for name in layer} <= set(graph)
    assert len({find_layer(name) for name in graph}) == len(LAYERS)
    assert "compatibility.layers" in graph["hooks"], "inside a function"
    assert "policies.plan" in graph[""], "for type checking alone"
    assert "selection.triton_kernel.budgets" in graph["selection"], "one package down"
    assert "policies.plan" in graph["selection.triton_kernel.recipe"], "two packages up"
    assert "patching.tree" in graph["patching.engine"], "beside it"


@pytest.mark.parametrize("name", ["sglang_xshare", "sglang_xshare.hooks", "sglang_xshare.cli"])
def test_what_sglang_and_patching_import_first_is_light(name):
    """server_args.py imports the hooks, and patching needs neither."""
    command = f"import sys, {name}; print({{'torch', 'sglang', 'triton', 'transformers'}} & set(sys.modules))"
    env = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run([sys.executable, "-c", command], env=env, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("set()\n", 0), done.stderr
