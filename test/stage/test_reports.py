"""What a stage reports, and when: log, metrics and trace, each what is new to it."""

from collections import Counter
from functools import partial
from typing import Any

import pytest

from sglang_xshare import hooks
from sglang_xshare.stage.record.agreement import Agreement
from stage.fake import XSHARE, Model, gathered_batches, make_reporter, replay, run


@pytest.fixture
def serve(build):
    """Call it with flags for a model of one layer under a stage, and a list to which each exported part of `group` is
    appended as `read` returns it: by default the steps under the policy in an interval.
    """

    def start(group="counted", read=lambda part: part.outcomes["policy"], **flags):
        model, _ = build(1, **XSHARE, **flags)
        exported = []

        def export(name, part, labels):
            if name == group:
                exported.append(read(part))

        hooks._reports.exporter.export = export
        return model, exported

    return start


def test_the_log_tells_what_idle_metrics_exported_before(serve):
    model, exported = serve()
    run(model, "decode", 4)
    reporter = make_reporter(forwards=1)
    hooks.publish(reporter)
    run(model, "decode", 4)
    reporter.forward_ct_decode = 2
    hooks.publish(reporter)
    hooks.publish(reporter)  # nothing new: an idle server asks again and again
    assert "policy steps: 2," in hooks.report(reporter)
    assert exported == [1, 1]
    run(model, "decode", 4)
    reporter.forward_ct_decode = 2  # as after a flush, which sets it to 0
    assert "policy steps: 1," in hooks.report(reporter)
    reporter.scheduler.forward_ct = 3  # for requests of another rank of data-parallel attention
    run(model, "decode", 4)
    hooks.publish(reporter)
    assert exported == [1, 1, 2]


def test_one_rank_exports_what_all_have_seen_and_each_logs_it(serve, monkeypatch, tmp_path):
    file = tmp_path / "trace.jsonl"
    model, exported = serve(expert_policy_trace=str(file))
    run(model, "decode", 4)
    monkeypatch.setattr("sglang_xshare.stage.reports.is_first_rank", lambda: False)
    assert "policy steps: 1," in hooks.report(make_reporter(forwards=1))
    assert (exported, file.read_text()) == ([], "")
    monkeypatch.setattr("sglang_xshare.stage.reports.is_first_rank", lambda: True)
    hooks.publish(make_reporter(forwards=1))
    assert exported == [1]
    assert len(file.read_text().splitlines()) == 1


def test_a_process_without_a_scheduler_reports_at_its_end(build, tmp_path, caplog):
    """`sglang.benchmark.one_batch` has no scheduler. A process with one reports to it, and not again at its end."""
    for is_first, reporter, lines in ((True, None, 2), (False, None, 0), (True, make_reporter(), 0)):
        caplog.clear()
        file = tmp_path / f"{is_first} {reporter is None}.jsonl"
        with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO"):
            patch.setattr("sglang_xshare.stage.reports.is_first_rank", lambda is_first=is_first: is_first)
            model, _ = build(**XSHARE, expert_policy_trace=str(file))
            hooks._reports.reporter = reporter
            for _ in range(2):
                run(model, "decode", 8)
            hooks._close()
            hooks._close()  # nothing is there twice
        assert len(file.read_text().splitlines()) == lines * len(model.configs)
        ends = [record.getMessage() for record in caplog.records if "at the end" in record.getMessage()]
        assert len(ends) == bool(lines)
        assert not ends or "policy steps: 2" in ends[0]


def decode_elsewhere(model: Model, reporter: Any, forwards: int, requests: int = 3) -> None:
    """Forwards of an attention rank without requests, the first, while another rank decodes `requests`."""
    for _ in range(forwards):
        batch = gathered_batches("decode", [0, requests])[0]
        reporter.scheduler.forward_ct += 1  # and no decode step of its own
        replay(batch, partial(run, model, "decode", 2 * requests, alone=True))


def test_an_idle_first_rank_publishes_what_others_decode(serve, tmp_path):
    """Its own decode log, which would publish, comes only with its own decode steps."""
    file = tmp_path / "trace.jsonl"
    model, exported = serve(expert_policy_trace=str(file))
    reporter = make_reporter(decode_log_interval=5)
    hooks.publish(reporter)  # the server is idle before its first request, which goes to the other rank
    decode_elsewhere(model, reporter, 5)
    assert exported == []
    decode_elsewhere(model, reporter, 13)
    assert exported == [6, 6, 6]
    assert len(file.read_text().splitlines()) == 18


def test_a_first_rank_that_decodes_publishes_with_its_log_alone(serve):
    """Each publication waits for the device."""
    model, exported = serve()
    reporter = make_reporter(decode_log_interval=5)
    for _ in range(4):
        decode_elsewhere(model, reporter, 5)
        reporter.forward_ct_decode += 5
        hooks.report(reporter)
    assert exported == [5, 5, 5, 5]


def test_a_server_without_data_parallel_attention_publishes_with_its_log_alone(serve):
    model, exported = serve()
    reporter = make_reporter(decode_log_interval=5)
    hooks.publish(reporter)
    for _ in range(20):
        run(model, "decode", 4)
        reporter.scheduler.forward_ct += 1
    assert exported == []


def test_what_ranks_have_compared_is_exported_once(serve):
    _, exported = serve("compared", Counter)
    hooks._stage.agreement = agreement = Agreement(2, "cpu")
    for number in (1, 2):
        agreement.counts.update(comparisons=number, disagreements=1)
        hooks.publish(make_reporter(forwards=number))
    assert exported == [Counter(comparisons=1, disagreements=1), Counter(comparisons=2, disagreements=1)]


def test_a_rank_whose_scheduler_logs_no_statistics_writes_no_trace(serve, tmp_path):
    """As the second of several pipeline or context ranks: one of them has the file."""
    file = tmp_path / "trace.jsonl"
    model, exported = serve(expert_policy_trace=str(file))
    run(model, "decode", 4)
    hooks.publish(make_reporter(forwards=1, is_stats_logging_rank=False))
    assert (exported, file.read_text()) == ([1], "")
    hooks.publish(make_reporter(forwards=2, current_scheduler_metrics_enabled=False))
    assert exported == [1], "without --enable-metrics there is nothing to export to"
