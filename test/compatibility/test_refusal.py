"""How a server ends that is refused: with one line and status 1, also where only its scheduler knows why."""

import copy
import json
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sglang_xshare import hooks
from sglang_xshare.cli import main
from sglang_xshare.refusal import REFUSED, ExpertPolicyError, refusal


def test_a_dead_scheduler_ends_its_server_with_status_1_where_it_has_refused():
    with pytest.raises(hooks.Refused, match="refused") as ended:
        hooks.check_exit(REFUSED)
    assert ended.value.code == 1
    for code in (None, 0, 1, -9):
        hooks.check_exit(code)


def test_upstream_asks_for_the_exit_code_of_a_dead_scheduler():
    """In the patched release, before it raises an error of its own, whose traceback users would read."""
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


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        ("vanilla", None),
        ("xshere", "--expert-policy xshere: policy = 'xshere':"),
        ("xshare:{", "--expert-policy xshare:{: policy 'xshare:{':"),
        ("", "--expert-policy : policy = '':"),
    ],
)
def test_policies_show_refuses_what_a_server_refuses(policy, line, capsys):
    assert main(["policies", "--show", policy]) == int(line is not None)
    out, err = capsys.readouterr()
    if line is None:
        assert (json.loads(out), err) == ({"policy": "vanilla"}, "")
    else:
        assert (out, err.count("\n"), err.startswith(f"policies: {line}")) == ("", 1, True)
