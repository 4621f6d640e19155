"""The policy in SGLang's own controller."""

from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController
from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams

from depth.simulation import CANDIDATES, WELL, Candidates, Simulation, Traffic, costs
from sglang_xshare.depth import is_on
from sglang_xshare.depth.decision import BLOCK, TRIAL
from sglang_xshare.depth.policy import ThroughputPolicy
from sglang_xshare.depth.shares import Shares
from sglang_xshare.stage.acceptance import Acceptance, find_nearest

TRAFFIC = Traffic(2, WELL, costs(10e-3, 1e-3))


class Worker:
    """SGLang's `AdaptiveSpecWorker`."""

    def __init__(self, steps: int) -> None:
        self.speculative_num_steps = steps
        self.built: dict[int, list[int] | None] = {}

    def build_adaptive_runtime_state(
        self, speculative_num_steps: int, speculative_num_draft_tokens: int, cuda_graph_bs: list[int] | None = None
    ) -> Any:
        assert speculative_num_draft_tokens == speculative_num_steps + 1
        self.built[speculative_num_steps] = cuda_graph_bs
        return SimpleNamespace(speculative_num_steps=speculative_num_steps)

    def apply_runtime_state(self, state: Any) -> None:
        self.speculative_num_steps = state.speculative_num_steps


def make(
    upstream: Any = None, captured: Sequence[int] = (), flag: list[int] | None = None, steps: int = 3, **options: Any
) -> Any:
    """SGLang's controller with a policy of ours; SGLang captures the sizes `captured`, whatever its `flag` has."""
    forwards = [0]
    options = {"list_captured": lambda: captured} | options
    policy = ThroughputPolicy(upstream or Candidates(), steps, lambda: forwards[0], **options)
    controller = AdaptiveController(Worker(steps), policy)
    controller.register(SimpleNamespace(speculative_num_steps=steps))
    controller.init_states(flag)
    controller.forwards = forwards
    return controller


def launch(controller: Any, requests: int) -> int:
    controller.activate_step_by_batch(requests)
    controller.forwards[0] += 1
    return controller.worker.speculative_num_steps


def complete(controller: Any, requests: int, accepted: int = 0) -> None:
    controller.on_verify_complete([accepted] * requests, requests)


def test_the_controller_of_sglang_runs_the_depth_of_the_policy():
    controller = make(clock=count().__next__)
    assert set(controller._states) == set(CANDIDATES)
    used = []
    for _ in range(BLOCK + 4 * (TRIAL + BLOCK)):
        used.append(launch(controller, 2))
        complete(controller, 2)
        assert controller.worker.speculative_num_steps == used[-1], "it changes with a launch alone"
    assert [used.count(depth) for depth in CANDIDATES] == [TRIAL, TRIAL, 5 * BLOCK, TRIAL, TRIAL]


def test_candidates_of_a_batch_size_are_those_of_the_configuration_and_no_drafts(tmp_path):
    """By SGLang's own reading of it, which rounds a batch size down to a key of the configuration."""
    config = tmp_path / "adaptive.json"
    config.write_text('{"1": {"candidate_steps": [true, 3, 7]}, "8": {"candidate_steps": [true, 3]}}')
    controller = make(AdaptiveSpeculativeParams(initial_steps=3, cfg_path=str(config)), captured=[1, 2, 4, 8, 16])
    assert str(controller.candidate_steps) == "[0, 1, 3, 7]", "true is 1"
    depths = controller.params.depths
    assert [depths.find(size).candidates for size in (4, 8, 16)] == [(0, 1, 3, 7), (0, 1, 3), (0, 1, 3)]


@pytest.mark.parametrize("flag", [None, [1, 2, 64]])
def test_every_depth_is_built_for_all_sizes(flag):
    """No release captures fewer sizes for a depth."""
    assert make(flag=flag).worker.built == dict.fromkeys({*CANDIDATES} - {3})


def test_a_batch_counts_for_the_captured_size_that_it_runs_in():
    sizes = {1: 1, 3: 4, 8: 8, 9: 9, 16: 16, 17: 16, 32: 32, 33: 32, 63: 32, 100: 64}
    for requests, size in sizes.items():
        policy = make(captured=[1, 2, 4, 8]).params
        policy.get_steps_for_batch(requests)
        assert list(policy.depths.states) == [size], requests


@pytest.mark.parametrize("flag", [None, [1, 2, 4, 8, 16, 24, 64, 128]])
@pytest.mark.parametrize("captured", [(), (1, 2, 4, 8, 16, 24, 40)])
def test_a_batch_has_the_candidates_that_sglang_has_for_its_captured_size(captured, flag):
    """SGLang's table changes at 8, 32 and 64 requests. The sizes above 40 of its flag are not captured."""
    policy = make(AdaptiveSpeculativeParams(initial_steps=3, cfg_path=None), captured, flag).params
    for requests, candidates in ((4, (0, 1, 3, 5, 7)), (17, (0, 1, 3)), (24, (0, 1, 3)), (33, (0, 1)), (64, (0,))):
        policy.get_steps_for_batch(requests)
        size = policy._launched[-1].size
        assert policy.depths.states[size].candidates == candidates, requests
        assert size == next((one for one in captured if one >= requests), size)


def test_eager_sizes_share_times_only_with_the_same_candidates(tmp_path):
    config = tmp_path / "adaptive.json"
    config.write_text('{"1": {"candidate_steps": [1, 3, 5]}, "24": {"candidate_steps": [0]}}')
    policy = make(AdaptiveSpeculativeParams(initial_steps=3, cfg_path=str(config))).params
    for requests, size, candidates in ((23, 16, (0, 1, 3, 5)), (24, 24, (0,)), (31, 31, (0,)), (33, 32, (0,))):
        policy.get_steps_for_batch(requests)
        assert (policy._launched[-1].size, policy.depths.states[size].candidates) == (size, candidates)


def test_more_accepted_drafts_than_a_launch_has_are_another_step_s():
    """A result was dropped in between. The statistic must not end the scheduler."""
    controller = make()
    controller.params.depths.find(2).trial = 1
    launch(controller, 2)
    complete(controller, 2, accepted=3)
    assert controller.params.verifications == 0


def test_results_are_those_of_the_step_that_was_launched_first():
    """With overlap the next step is launched, at another depth maybe, before a result is processed."""
    controller = make()
    for _ in range(BLOCK):
        launch(controller, 2)
        complete(controller, 2, accepted=3)
    assert launch(controller, 2) == 1, "the next trial"
    controller.params.depths.states[2].trial = 7
    assert launch(controller, 2) == 7
    complete(controller, 2, accepted=1)  # of one draft, not of 7 drafts of which one was accepted
    assert controller.params.depths.shares.shares[0] == 1.0
    complete(controller, 2, accepted=0)
    assert controller.params.depths.shares.shares[0] < 1.0


def test_a_result_without_its_launch_is_left_out():
    """A batch that was launched and whose result was dropped, and a result that no launch fits."""
    controller = make()
    launch(controller, 4)
    launch(controller, 2)
    complete(controller, 2)
    assert controller.params.verifications == 1
    complete(controller, 4)
    assert controller.params.verifications == 1
    complete(controller, 0)


def test_a_switch_of_the_policy_forgets_the_times_and_keeps_the_acceptance():
    switches = [0]
    server = Simulation(options={"count_switches": lambda: switches[0]})
    server.serve(TRAFFIC, 300)
    depths = server.policy.depths
    shares, depth = depths.shares.shares, depths.states[2].depth
    assert len(depths.states[2].seconds) == len(CANDIDATES)
    assert server.policy._taken[2]  # times that the next decision would add
    switches[0] = 1
    server.policy.get_steps_for_batch(2)
    assert not server.policy._taken.get(2)
    assert (depths.states[2].seconds, depths.shares.shares, depths.states[2].depth) == ({}, shares, depth)


def test_each_timed_step_counts_in_one_decision():
    shared = []
    server = Simulation(noise=0.03, options={"take_first_ranks": lambda own: shared.append(own) or own})
    server.serve(TRAFFIC, 200)
    seconds = [one for own in shared for one in own]
    assert len(set(seconds)) == len(seconds) > 100


def test_times_across_a_switch_of_the_policy_are_left_out():
    """A step that was launched before the switch, and the first step after it, have no time."""
    switches, forwards = [0], [0]
    policy = ThroughputPolicy(Candidates(), 3, lambda: forwards[0], lambda: switches[0])
    for now in (0, 0, 1, 1, 1):
        switches[0] = now
        policy.get_steps_for_batch(2)
        forwards[0] += 1
        if policy._launched[0].forwards < policy._launched[-1].forwards:
            policy.on_verify_complete([1, 1], 2)
    policy.on_verify_complete([1, 1], 2)
    assert policy.verifications == 5
    assert [launch.forwards for launch, _ in policy._taken[2]] == [3, 4]


def test_the_first_step_of_another_depth_has_no_time():
    controller = make(clock=count().__next__)
    policy = controller.params
    for depth in (3, 3, 1, 1):
        policy.depths.find(2).trial = depth
        assert launch(controller, 2) == depth
        complete(controller, 2)
    assert [step.depth for step, _ in policy._taken[2]] == [3, 1]


def test_what_acceptance_auto_stands_for_is_the_share_of_all_drafts():
    shares = Shares(7)
    acceptance = Acceptance(4)
    acceptance.follow(8, lambda: shares.pooled)
    start = acceptance.number
    while not acceptance.begin_forward():
        shares.count(3, [3, 0])  # accepted: 3 of 4 drafts
        shares.count(0, [0, 0])
    assert acceptance.number == acceptance.estimate == find_nearest(3 / 4) != start
    acceptance.count(SimpleNamespace())  # requests tell nothing, since their drafts differ in length
    assert [find_nearest(chance) for chance in (0.0, 0.5, 1.0)] == [1 / 64, 0.5, 63 / 64]


@pytest.mark.parametrize(
    ("asked", "policy", "adapts", "on"),
    [
        ("throughput", None, True, True),
        ("throughput", "vanilla", True, True),
        ("throughput", "xshare", False, False),  # SGLang's drafter does not adapt
        ("upstream", "xshare:k0=1", True, False),
        (None, "xshare:k0=1", True, True),
        (None, "observe", True, True),
        (None, "vanilla", True, False),
        (None, None, True, False),
    ],
)
def test_a_policy_turns_it_on_unless_the_flag_says_otherwise(asked, policy, adapts, on):
    config = SimpleNamespace(expert_policy_draft_depth=asked, expert_policy=policy, speculative_adaptive=adapts)
    assert is_on(config) is on


def test_before_sglang_takes_a_policy_no_default_turns_it_on(monkeypatch):
    monkeypatch.setattr("sglang_xshare.depth.is_release", lambda since: False)
    config = SimpleNamespace(expert_policy_draft_depth=None, expert_policy="xshare", speculative_adaptive=True)
    assert not is_on(config)
