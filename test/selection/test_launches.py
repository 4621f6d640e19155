"""Every launch of a kernel of ours has the options that all share."""

import ast
from pathlib import Path

import sglang_xshare

PACKAGE = Path(sglang_xshare.__file__).parent


def is_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(one) for one in node.decorator_list)


def find_launches(node: ast.AST, kernels: set[str]) -> list[ast.Call]:
    """Calls of `kernel[grid]`, or of something that is given it."""

    def launches(part: ast.expr) -> bool:
        return isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name) and part.value.id in kernels

    return [
        call for call in ast.walk(node) if isinstance(call, ast.Call) and any(map(launches, [call.func, *call.args]))
    ]


def test_every_launch_has_the_options():
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    kernels = {node.name for tree in trees.values() for node in ast.walk(tree) if is_kernel(node)}
    found = {
        f"{path.name}:{call.lineno}": ["**OPTIONS" for key in call.keywords if ast.unparse(key) == "**OPTIONS"]
        for path, tree in trees.items()
        for call in find_launches(tree, kernels)
    }
    assert len(found) >= 3  # select, fill_rows and mask
    assert all(options == ["**OPTIONS"] for options in found.values()), found
