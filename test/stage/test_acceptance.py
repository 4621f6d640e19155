"""`acceptance: "auto"`: what is estimated from accepted drafts, and that the next step selects by it."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_xshare import Batch, Router, build_plan, hooks, select
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.stage.acceptance import MEMORY, Acceptance, estimate
from sglang_xshare.stage.record.metadata import KEY, Forward
from sglang_xshare.stage.stage import Stage
from sglang_xshare.upstream.server import draft_width
from stage.fake import TOP_K, Model, find_active, flags, forward, forward_batch, read_figure
from stage.switching import switch

WIDTH, START = 4, 63 / 64
AUTO: dict[str, Any] = {"k0": 1, "add": 3, "acceptance": "auto"}
DRAFTING: dict[str, Any] = {"speculative_algorithm": "EAGLE3", "speculative_num_draft_tokens": WIDTH}


def draft(chance: float, width: int, verifications: int, seed: int = 0) -> tuple[int, int]:
    """(verifications, accepted drafts) of chains whose drafts are right with a chance if all before them are."""
    drawn = random.Random(seed)
    accepted = 0
    for _ in range(verifications):
        right = 0
        while right < width - 1 and drawn.random() < chance:
            right += 1
        accepted += right
    return verifications, accepted


def accept(request: SimpleNamespace, drafts: tuple[int, int]) -> SimpleNamespace:
    """Upstream's counters of a request, after so many verifications more."""
    request.spec_verify_ct += drafts[0]
    request.spec_num_correct_drafts += drafts[1]
    return request


def make_request() -> SimpleNamespace:
    return SimpleNamespace(spec_verify_ct=0, spec_num_correct_drafts=0, customized_info=None)


@pytest.mark.parametrize("width", [2, 4, 16])
@pytest.mark.parametrize("chance", [0.1, 0.5, 0.75, 0.95])
def test_the_chance_of_simulated_chains_is_found_again(chance, width):
    verified, accepted = draft(chance, width, 20_000)
    assert estimate(accepted / verified, width) == pytest.approx(chance, abs=1 / 64)


@pytest.mark.parametrize("width", [1, 2, 5, 256])
def test_more_accepted_is_never_a_smaller_chance_and_all_have_bounds(width):
    found = [estimate((width - 1) * part / 100, width) for part in range(101)]
    assert (found, found[-1], found[0]) == (sorted(found), START, 1 / 64 if width > 1 else START)
    assert all(chance * 64 == int(chance * 64) for chance in found)


def test_a_server_that_has_counted_nothing_keeps_what_it_begins_with():
    acceptance = Acceptance(WIDTH)
    assert not any(acceptance.begin_forward() for _ in range(2048))
    assert acceptance.number == acceptance.estimate == START
    assert Acceptance().estimate is None


def test_ranks_estimate_alike_and_follow_the_traffic():
    """Batches of any size, requests that come and go: at the same forwards, the same numbers."""
    ranks = [Acceptance(WIDTH) for _ in range(2)]
    seen = []
    for chance in (0.9, 0.3):
        for step in range(4096):
            requests = [make_request() for _ in range(1 + step % 3)]
            for number, request in enumerate(requests):
                accept(request, draft(chance, WIDTH, 1, seed=8 * step + number))
            for acceptance in ranks:
                for request in requests:
                    request.expert_policy_drafts = 0, 0
                    acceptance.count(request)
            changed = {acceptance.begin_forward() for acceptance in ranks}
            assert len(changed) == len({acceptance.number for acceptance in ranks}) == 1
        seen.append(ranks[0].number)
    assert seen[0] == pytest.approx(0.9, abs=0.05)
    assert seen[1] < 0.6, "half of what is remembered is of the last forwards"
    assert ranks[0]._verified <= MEMORY + 3 * 1024


def test_however_many_verifications_come_at_once_the_same_number_is_remembered():
    acceptance = Acceptance(WIDTH)
    acceptance.count(accept(make_request(), (100_000, 0)))
    assert acceptance.begin_forward()
    assert MEMORY / 2 < acceptance._verified <= MEMORY


def test_a_change_is_logged_when_it_is_large(caplog):
    """Small changes add up, because the estimate is compared with the one that was logged last."""
    shares = iter([60 / 64, 55 / 64])
    acceptance = Acceptance(WIDTH)
    acceptance.follow(WIDTH, lambda: next(shares))
    with caplog.at_level("INFO"):
        assert acceptance.begin_forward()
        assert acceptance.begin_forward()
    assert caplog.messages == ["Expert policy: drafts accepted with chance 0.86 now, 0.98 before"]


def test_a_result_counts_once():
    """Of a request's totals what is new: one result may be of a prefill, and a retracted request goes on."""
    acceptance, request = Acceptance(WIDTH), make_request()
    begun = acceptance._verified, acceptance._accepted
    for drafts in ((1, 3), (0, 0), (1, 0), (1, 2)):
        acceptance.count(accept(request, drafts))
    assert (acceptance._verified - begun[0], acceptance._accepted - begun[1]) == (3, 5)


@pytest.mark.parametrize(
    ("flags", "width"),
    [
        ({}, 1),
        ({"speculative_num_draft_tokens": 4, "speculative_num_steps": 3, "speculative_eagle_topk": 1}, 4),
        ({"speculative_num_draft_tokens": 8, "speculative_num_steps": 3, "speculative_eagle_topk": 4}, 4),
        ({"speculative_num_draft_tokens": 2, "speculative_num_steps": 3, "speculative_eagle_topk": 4}, 2),
        ({"speculative_num_draft_tokens": 16, "speculative_num_steps": 1, "speculative_eagle_topk": None}, 16),
        # As SGLang resolves NGRAM's defaults.
        ({"speculative_num_draft_tokens": 12, "speculative_num_steps": 1, "speculative_eagle_topk": 10}, 12),
    ],
    ids=["none", "chain", "tree", "small tree", "DFlash", "NGRAM"],
)
def test_how_many_tokens_a_step_can_give(flags, width, request):
    algorithm = "NGRAM" if "NGRAM" in request.node.name else "EAGLE3"
    assert draft_width(SimpleNamespace(speculative_algorithm=algorithm, **flags)) == width


# On a stage.


class Server:
    """A stage around a fake model whose steps verify, and a request that accepts drafts."""

    def __init__(self, model: Model, stage: Stage) -> None:
        self.model, self.stage, self.request = model, stage, make_request()

    def verify(self, requests: int = 3) -> None:
        """A step."""
        batch = forward_batch("verify", requests * WIDTH, requests)
        batch.positions = torch.arange(requests * WIDTH) % WIDTH + 7
        forward(self.model, batch)

    def accept(self, drafts: tuple[int, int]) -> None:
        """Results reach the request, and as many forwards as it takes until they count."""
        hooks.count(accept(self.request, drafts), SimpleNamespace(**{KEY: Forward("xshare", True, True)}))
        while not self.stage.acceptance.begin_forward():
            pass
        self.stage._weigh()

    def check(self, acceptance: float, requests: int = 3) -> None:
        """That a step selects by a number, as the reference does."""
        self.verify(requests)
        plan = build_plan("xshare", **AUTO | {"acceptance": acceptance})
        batch = Batch(tokens_per_request=WIDTH)
        expected = select(self.model.logits, plan, Router(TOP_K), batch, backend="reference")
        assert all(routed and find_active(routed).equal(expected.active) for routed in self.model.routed)


@pytest.fixture
def serve(build):
    return lambda keys: Server(*build(2, **flags("xshare", **keys), **DRAFTING))


def test_the_next_step_selects_by_the_estimate(serve, caplog):
    server = serve(AUTO)
    server.check(START)
    in_force = server.stage.in_force.shown
    for drafts, number in (((64, 0), 0.6875), ((8000, 16), 1 / 32)):
        server.accept(drafts)
        assert server.stage.acceptance.number == number
        server.check(number)
        server.check(number, requests=5)
    assert server.stage.in_force.shown == in_force, "the hash of a plan stays"
    with caplog.at_level("INFO"):
        server.accept((100_000, 200_000))
    assert "drafts accepted with chance 0.78 now" in caplog.text
    assert "0.03 before" in caplog.text


def test_other_layers_keep_their_number(serve):
    server = serve(AUTO | {"layers": {"1": {"acceptance": 0.5}}})
    server.accept((8000, 0))
    found = [server.stage.in_force.schedule.plan(layer, 12).acceptance for layer in (0, 1)]
    assert found == [1 / 64, 0.5]


def test_a_switch_takes_what_was_counted_before(serve, reporter):
    """From a number to auto, to vanilla and back."""
    server = serve(AUTO | {"acceptance": 0.5})
    server.accept((8000, 0))
    server.check(0.5)

    def take(policy: str, **keys: Any) -> None:
        switch(server.stage, build_schedule(policy, keys, speculative=True), reporter)

    take("xshare", **AUTO)
    server.check(1 / 64)
    take("vanilla")
    server.accept((100_000, 300_000))
    server.verify()
    assert server.model.routed == [None, None]
    take("xshare", **AUTO)
    server.check(server.stage.acceptance.number)
    assert server.stage.acceptance.number > 0.9
    take("xshare", **AUTO | {"acceptance": 1.0})
    server.check(1.0)


def test_the_metric_is_the_estimate(serve, reporter):
    server = serve(AUTO)
    server.accept((8000, 0))
    hooks._reports.reporter = reporter
    hooks._reports.publish(always=True)
    assert read_figure("acceptance") == 1 / 64
