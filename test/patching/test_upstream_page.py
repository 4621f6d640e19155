"""The rows for upstream's page of server arguments say what the flags themselves say."""

import re

import pytest

from sglang_xshare.patching.queue import find_root

PAGE = (find_root() / "upstream/server_arguments.mdx").read_text()
OPTIONS = {"Optional[str]": "Type: str", "Optional[float]": "Type: float", "bool": "bool flag (set to enable)"}


def read_flags(patch: str) -> list[list[str]]:
    """Flag, help text, default and options of every argument that a patch adds: the four cells of a row."""
    added = re.findall(r'^\+    (\w+): A\[(.+?), "(.*?)"(?:, NS.*)?\] = (\w+)$', patch, re.MULTILINE)
    return [[f"`--{name.replace('_', '-')}`", text, f"`{value}`", OPTIONS[kind]] for name, kind, text, value in added]


@pytest.mark.parametrize("until", ["", "-until-0.5.19"])
def test_every_flag_has_its_row(until: str) -> None:
    rows = [
        re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in re.findall(r"<tr>(.*?)</tr>", PAGE, re.DOTALL)
    ]
    patches = [find_root() / f"shared/{name}{until}.patch" for name in ("arguments", "affinity-arguments")]
    flags = [flag for patch in patches for flag in read_flags(patch.read_text())]
    assert len(flags) == 8
    assert rows == flags
