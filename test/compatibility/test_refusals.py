"""Every refusal: it is one line, which begins with the flag and its value where the error has them as data, and its
words are in `refusals.json` and nowhere else. To write it anew:

REFUSALS=write python -m pytest test/compatibility/test_refusals.py

And how a refused server ends: with that line and status 1, also where only its scheduler knows why.
"""

import copy
import json
import os
import pickle
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest

from compatibility import test_server
from compatibility.refusals import FILE, LINES
from refused import read_refusal
from served.release import LATEST
from sglang_xshare import hooks
from sglang_xshare.cli import main
from sglang_xshare.refusal import REFUSED, ExpertPolicyError, refusal

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


def test_a_dead_scheduler_ends_its_server_with_status_1_where_it_has_refused():
    with pytest.raises(hooks.Refused, match="refused") as ended:
        hooks.check_exit(REFUSED)
    assert ended.value.code == 1
    for code in (None, 0, 1, -9):
        hooks.check_exit(code)


def test_upstream_asks_for_the_exit_code_of_a_dead_scheduler():
    """The patched release asks before it raises its own error, which would print a traceback."""
    engine = pytest.importorskip("sglang.srt.entrypoints.engine", reason="needs an installed SGLang")
    scheduler = SimpleNamespace(join=lambda timeout: None, exitcode=REFUSED)
    with pytest.raises(hooks.Refused):
        engine._scheduler_died_error(0, scheduler)
    scheduler.exitcode = -9
    assert "OOM" in str(engine._scheduler_died_error(0, scheduler))


def test_why_something_is_refused_is_data_and_one_line():
    error = refusal("--device", "npu", "must be one of cuda, cpu")
    assert (error.flag, error.value) == ("--device", "npu")
    assert error.reason == "cannot be served with an expert policy: must be one of cuda, cpu"
    assert str(error) == f"--device npu: {error.reason}"
    assert str(ExpertPolicyError("--mask-padding-experts", None, "why")) == "--mask-padding-experts: why"
    assert not isinstance(error, SystemExit), "who finds the reason does not end the process"
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (str(twin), twin.flag) == (str(error), "--device")


SERVER = "SimpleNamespace(expert_policy='nope')"
LINE = "--expert-policy nope: policy = 'nope': "


def test_a_refused_server_says_its_line_and_exits_with_1():
    code = f"from types import SimpleNamespace; from sglang_xshare import hooks; hooks.check_flags({SERVER})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(LINE)


def test_who_makes_an_engine_catches_a_value_error():
    with pytest.raises(ValueError, match=f"^{LINE}") as raised:
        hooks.check_flags(SimpleNamespace(expert_policy="nope"))
    assert isinstance(raised.value, SystemExit)
    assert raised.value.__suppress_context__


def test_policies_show_refuses_what_a_server_refuses(capsys):
    assert main(["policies", "--show", "vanilla"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == ({"policy": "vanilla"}, "")
    for policy, reason in (("xshere", "policy = 'xshere':"), ("xshare:{", "policy 'xshare:{':"), ("", "policy = '':")):
        assert main(["policies", "--show", policy]) == 1
        assert read_refusal(capsys).startswith(f"policies: --expert-policy {policy}: {reason}")
