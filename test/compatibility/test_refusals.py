"""Every refusal: it is one line, which begins with the flag and its value where the error has them as data, and its
words are in `refusals.json` and nowhere else. To write it anew:

REFUSALS=write python -m pytest test/compatibility/test_refusals.py
"""

import json
import os
from importlib import import_module

import pytest

from compatibility import test_server
from compatibility.refusals import FILE, LINES
from served.release import LATEST
from sglang_xshare.refusal import ExpertPolicyError

NAMES = {
    **{"plans": "policies.test_plan", "schedules": "policies.test_schedule", "affinity": "affinity.test_arguments"},
    **{"arguments": "compatibility.test_arguments", "modes": "compatibility.test_modes"},
    **{"exact requests": "compatibility.test_exact", "draft depths": "compatibility.test_drafts"},
    **{"placement": "compatibility.test_expert_placement", "layers": "compatibility.test_layers"},
    "runners": "compatibility.test_runners",
}
LISTS = {name: import_module(module) for name, module in NAMES.items()}
"""Modules with a list of what is refused, `REFUSED`, and `refuse`, which has one of it refused."""


def read_line(error: ValueError) -> str:
    line = str(error)
    assert "\n" not in line
    if isinstance(error, ExpertPolicyError):
        assert line.startswith(f"{error.flag}: " if error.value is None else f"{error.flag} {error.value}: ")
    return line


def test_every_line_is_as_written(monkeypatch, tmp_path, tmp_path_factory, tiny_model, request):
    """`test_server.py` compares those of servers, on every release."""
    found = {}
    for name, module in LISTS.items():
        found[name] = {}
        for case in module.REFUSED:
            with monkeypatch.context() as patch, pytest.raises(ValueError) as raised:  # noqa: PT011 - lines are compared
                module.refuse(case, patch, tmp_path)
            line = read_line(raised.value).replace(str(tiny_model), "{model}")
            found[name][case] = line.replace(str(tmp_path), "{folder}")
    if os.environ.get("REFUSALS") == "write":
        tree = request.getfixturevalue("patched_release")(LATEST)
        lines = test_server.tell(tree, tiny_model, tmp_path_factory.mktemp("written"))
        FILE.write_text(json.dumps(found | lines, indent=1) + "\n")
        return
    assert found == {name: LINES[name] for name in LISTS}
