"""How the server's process learns that its scheduler has refused the model."""

from types import SimpleNamespace

import pytest

from sglang_xshare.refusal import REFUSED, ExpertPolicyError, check_exit


def test_a_dead_scheduler_ends_its_server_with_status_1_where_it_has_refused():
    with pytest.raises(ExpertPolicyError, match="refused") as ended:
        check_exit(REFUSED)
    assert ended.value.code == 1
    for code in (None, 0, 1, -9):
        check_exit(code)


def test_upstream_asks_for_the_exit_code_of_a_dead_scheduler():
    """In the patched release, before it raises an error of its own, whose traceback users would read."""
    engine = pytest.importorskip("sglang.srt.entrypoints.engine", reason="needs an installed SGLang")
    scheduler = SimpleNamespace(join=lambda timeout: None, exitcode=REFUSED)
    with pytest.raises(ExpertPolicyError):
        engine._scheduler_died_error(0, scheduler)
    scheduler.exitcode = -9
    assert "OOM" in str(engine._scheduler_died_error(0, scheduler))


def test_error_is_a_value_error_that_exits_with_its_line():
    """`Engine` users catch a ValueError; uncaught, Python prints the line alone and exits with 1."""
    error = ExpertPolicyError("line")
    assert isinstance(error, ValueError)
    assert isinstance(error, SystemExit)
    assert error.code == "line"
