"""Reads for exact requests: the scheduler's storage and reporter on arrival, and the flags in a capture."""

from types import SimpleNamespace

from sglang_xshare import hooks
from sglang_xshare.stage.exact import ATTACHED, Exact
from stage.test_exact import Req, served

__all__ = ["served"]


def test_a_request_that_arrives_tells_what_is_attached_and_who_reports(served):
    """A storage may be attached while the server runs."""
    reporter = SimpleNamespace()
    for is_attached, answer in ((False, None), (True, ATTACHED)):
        scheduler = SimpleNamespace(enable_hicache_storage=is_attached, metrics_reporter=reporter)
        hooks.admit(scheduler, req := Req(f"attached {is_attached}", "exact"))
        assert req.aborted == answer
    assert hooks._reports.reporter is reporter


def test_a_graph_reads_flags_though_no_row_is_exact_at_its_capture():
    """Its replays have exact rows: the capture on a device reads the flags where they lie."""
    assert Exact("cpu").find(4) is None
    assert Exact("meta").find(4).shape == (4,)
