"""Ranks that have selected differently: the server goes back to vanilla, or ends, and says which."""

import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_xshare import hooks
from sglang_xshare.live.control import Checked, Control
from sglang_xshare.policies.exact import Rule
from sglang_xshare.stage.stage import LastSwitch
from sglang_xshare.stage.switch import make_next
from sglang_xshare.upstream.batches import Batches
from stage.fake import XSHARE, make_reporter, run
from stage.switching import PLANS, schedule, switch

WHICH = "ranks [1] have selected other experts than the first"


class Ended(Exception):
    """The server is told to end."""


@pytest.fixture
def serve(build, monkeypatch):
    """Call it with flags for the runner's forward on the first of two ranks; the second differs by `differs`."""

    def end() -> None:
        raise Ended

    def start(batches: Batches | None = None, **changes: Any) -> Any:
        monkeypatch.setattr("sglang_xshare.live.control.is_first_rank", lambda: True)
        monkeypatch.setattr("sglang_xshare.stage.switch.end_server", end)
        model, stage = build(3, batches, **XSHARE | changes, tp_size=2)
        served = SimpleNamespace(stage=stage, reports=hooks._reports, differs=[])
        stage.agreement._gather = lambda own, ranks: torch.cat([own, own * (1 + len(served.differs))])
        served.reports.reporter = make_reporter(current_scheduler_metrics_enabled=False)

        def decode() -> list[bool]:
            """A step; whether each layer selects."""
            run(model, "decode", 8)
            return [routed is not None for routed in model.routed]

        def post(keys: dict[str, Any]) -> None:
            control = Control(served.reports, SimpleNamespace())
            latter = make_next(stage, schedule(keys), Rule())
            control._checked = Checked("1", stage.last_switch.number, latter, False, True, [])
            control.commit("1", stage.last_switch.number + 1)

        served.decode, served.post = decode, post
        return served

    return start


@pytest.mark.parametrize(("is_first", "level"), [(True, "ERROR"), (False, "DEBUG")])
def test_the_step_after_a_comparison_that_failed_is_vanilla(serve, caplog, monkeypatch, is_first, level):
    """On every rank; the first one's log has the error."""
    served = serve()
    monkeypatch.setattr("sglang_xshare.stage.switch.is_first_rank", lambda: is_first)
    assert served.decode() == [True] * 3
    served.differs = [1]
    with caplog.at_level(logging.DEBUG):
        assert served.decode() == [True] * 3
    (record,) = (record for record in caplog.records if WHICH in record.message)
    assert record.levelname == level
    assert record.message.startswith(f"Expert policy: {WHICH}: ")
    assert record.message.endswith("; vanilla from the next step on")
    for _ in range(8):
        assert served.decode() == [False] * 3
    assert served.stage.agreement.counts == Counter(comparisons=2, disagreements=1, fallbacks=1)
    assert served.stage.in_force.given == {"policy": "vanilla"}
    assert served.stage.last_switch.disagreement.startswith(WHICH)


def test_a_difference_under_one_policy_is_not_the_next_ones(serve):
    """Ranks compare sums over all steps since the last comparison."""
    served = serve()
    for _ in range(3):
        served.decode()
    assert served.stage.agreement._checksum.any(), "the third step was counted and not compared"
    served.post(PLANS[0])
    assert not served.stage.agreement._checksum.any()


def test_what_is_posted_later_is_compared_at_once(serve):
    served = serve()
    served.stage.agreement.forwards = 600  # from here on forwards are rarely compared
    served.post(PLANS[0])
    served.differs = [1]
    assert (served.decode(), served.decode()) == ([True] * 3, [False] * 3)
    assert (served.stage.last_switch.number, served.stage.last_switch.posted) == (2, 1)
    served.differs = []
    served.post(PLANS[0])
    assert served.stage.last_switch.disagreement is None
    assert [served.decode() for _ in range(4)] == [[True] * 3] * 4
    assert served.stage.last_switch.number == 3
    assert served.stage.agreement.counts["fallbacks"] == 1


def test_get_tells_it_and_no_trial_is_left(serve):
    served = serve()
    control = Control(served.reports, SimpleNamespace())
    served.stage.last_switch = LastSwitch(is_trial=True)
    assert (control.get()["disagreement"], control.get()["trial"]) == (None, True)
    served.differs = [1]
    served.decode()
    told = control.get()
    assert (told["policy"], told["switches"], told["trial"]) == ("vanilla", 1, False)
    assert told["disagreement"].startswith(WHICH)


def test_a_server_that_is_to_stop_ends_after_that_forward(serve, caplog):
    served = serve(expert_policy_on_disagreement="stop")
    served.decode()
    served.differs = [1]
    with pytest.raises(Ended):
        served.decode()
    assert served.stage.last_switch.number == 0
    assert [record.message.rpartition("; ")[2] for record in caplog.records] == ["the server ends"]


def test_where_no_policy_is_in_force_there_is_nothing_to_go_back_to(serve, caplog):
    served = serve(Batches(captured=(8,)), mask_padding_experts=True)
    served.decode()
    switch(served.stage, None, served.reports.reporter)
    served.differs = [1]
    served.decode()
    assert "; no policy is active" in caplog.text
    assert (served.stage.last_switch.number, served.stage.agreement.counts["fallbacks"]) == (1, 0)
    assert served.stage.last_switch.disagreement.startswith(WHICH)
