"""The rows for upstream's page of server arguments say what the flags themselves say."""

import re

import pytest

from sglang_xshare.patching.queue import find_root

PAGE = (find_root() / "upstream/server_arguments.mdx").read_text()
OPTIONS = {"Optional[str]": "Type: str", "bool": "bool flag (set to enable)"}


def read_flags(patch: str) -> list[list[str]]:
    """Flag, help text, default and options of every argument that a patch adds: the four cells of a row."""
    added = re.findall(r'^\+    (\w+): A\[(.+?), "(.*?)"(?:, NS.*)?\] = (\w+)$', patch, re.MULTILINE)
    return [[f"`--{name.replace('_', '-')}`", text, f"`{value}`", OPTIONS[kind]] for name, kind, text, value in added]


@pytest.mark.parametrize("patch", sorted(file.name for file in find_root().glob("shared/arguments*.patch")))
def test_every_flag_has_its_row(patch: str) -> None:
    rows = [
        re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in re.findall(r"<tr>(.*?)</tr>", PAGE, re.DOTALL)
    ]
    flags = read_flags((find_root() / "shared" / patch).read_text())
    assert len(flags) == 5
    assert rows == flags
