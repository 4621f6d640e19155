"""Depths meet traffic: simulated servers against the best fixed depth."""

import pytest

from depth.simulation import BADLY, CANDIDATES, WELL, Simulation, Traffic, costs

ARRIVES = 300
"""Verifications after a change of the traffic."""
ENOUGH = 0.97
MID = (0.6, 0.55, 0.5, 0.5, 0.45)


def load(requests, chances):
    """Traffic whose rows load experts: each further one costs more, the more requests there are."""
    return Traffic(requests, chances, costs(10e-3, 0.7e-3 * requests**0.7, drafting=1e-3))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("chances", [WELL, MID, BADLY])
@pytest.mark.parametrize("requests", [1, 2, 4, 8, 16])
def test_a_server_reaches_97_percent_of_the_best_fixed_depth_trials_included(requests, chances, seed):
    traffic, server = load(requests, chances), Simulation(seed=seed)
    server.serve(traffic, 400)
    assert server.reach(traffic, 1500) >= ENOUGH
    assert traffic.speed(traffic.best) >= traffic.speed(0), "so that no drafts are reached as well"


def test_the_cases_above_have_every_kind_of_answer():
    """Else a fixed depth could pass them."""
    assert {0, 1, 3, 5} <= {load(requests, one).best for requests in (1, 2, 4, 8, 16) for one in (WELL, MID, BADLY)}


@pytest.mark.parametrize("noise", [0.03, 0.1])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Traffic(16, WELL, costs(10e-3, 2.5e-3)), Traffic(1, WELL, costs(10e-3, 0.6e-3))),
        (Traffic(1, WELL, costs(10e-3, 0.6e-3)), Traffic(16, WELL, costs(10e-3, 2.5e-3))),
        (Traffic(1, WELL, costs(10e-3, 0.6e-3, 1e-3)), Traffic(1, BADLY, costs(10e-3, 0.6e-3, 1e-3))),
        (Traffic(4, BADLY, costs(10e-3, 0.6e-3, 1e-3)), Traffic(4, WELL, costs(10e-3, 0.6e-3, 1e-3))),
    ],
    ids=["16 requests to 1", "1 to 16", "text that is predicted badly", "text that is predicted well, from no drafts"],
)
def test_a_change_of_the_traffic_is_followed_within_300_verifications(before, after, noise):
    arrived = []
    for seed in range(20):
        server = Simulation(noise=noise, seed=seed)
        server.serve(before, 1000)
        used = server.serve(after, 2 * ARRIVES)
        good = [after.speed(depth) >= ENOUGH * after.speed(after.best) for depth in used]
        arrived.append(next((place for place in range(len(good)) if all(good[place : place + 32])), len(good)))
    late = [steps for steps in arrived if steps >= ARRIVES]
    assert len(late) <= 2, arrived  # of 20: at one request four verifications may mislead


def test_drafts_stop_if_they_do_not_pay_and_are_tried_again():
    badly = Traffic(2, BADLY, costs(10e-3, 3e-3, drafting=2e-3))
    server = Simulation()
    server.serve(badly, 400)
    assert set(server.serve(badly, 1024)) == {0}
    assert 8 <= sum(depth > 0 for depth in server.launch(badly, 1024)) <= 32, "4 in every 256, and one in flight"


def test_prefills_and_their_launches_are_in_no_time():
    """A host that launches a prefill for 50 ms sees the step before it 50 ms late."""
    traffic = Traffic(4, WELL, costs(10e-3, 1e-3))
    server = Simulation(noise=0.0, launching=50e-3)
    for number in range(900):
        if number % 3 == 0:
            server.prefill(1.0)
        server.step(traffic)
    seconds = server.policy.depths.states[4].seconds
    # Steps that wait, one in 200, count for little; a prefill takes 60 times as long.
    assert seconds == pytest.approx({depth: traffic.seconds(depth) for depth in seconds}, rel=0.2)
    assert set(seconds) == set(CANDIDATES)


def test_a_step_of_another_batch_size_between_two_is_in_no_time():
    one, other = Traffic(1, WELL, costs(10e-3, 1e-3)), Traffic(8, WELL, costs(50e-3, 5e-3))
    server = Simulation(noise=0.0)
    for number in range(900):
        server.step(one if number % 4 else other)
    seconds = server.policy.depths.states[1].seconds
    assert seconds == pytest.approx({depth: one.seconds(depth) for depth in seconds})
    assert server.policy.depths.states[8].seconds == {}, "no two of them in a row"


def test_ranks_with_other_clocks_decide_alike_by_the_times_of_the_first():
    sent = []
    traffic = Traffic(2, MID, costs(10e-3, 1e-3))

    def serve(noise: float, **options: object) -> list[int]:
        return Simulation(noise=noise, options=options).launch(traffic, 1500)

    # The same requests on both, by the same seed; what is drawn for the noise has no effect on them.
    first = serve(0.0, take_first_ranks=lambda own: sent.append(own) or own)
    queue = iter(sent)
    assert serve(0.0, take_first_ranks=lambda own: next(queue), clock=lambda: 0.0) == first
    assert next(queue, None) is None, "both share at the same count of verifications"
    assert serve(0.0, clock=iter(range(10**6)).__next__) != first, "by its own times it decides otherwise"


@pytest.mark.parametrize("seed", range(5))
def test_batches_whose_requests_end_one_by_one_cost_no_trials_at_each_size(seed):
    """16 requests of a few steps, as a benchmark sends them: each smaller size lasts two steps at a time."""
    sizes = [16] * 24 + [size for size in range(15, 0, -1) for _ in range(2)]
    served = [load(size, WELL) for size in sizes]
    server, totals = Simulation(seed=seed), {depth: [0.0, 0.0] for depth in (*CANDIDATES, None)}
    for _ in range(20):
        for traffic in served:
            server.step(traffic)
            for depth, total in totals.items():
                used = server.launched[-1][1] if depth is None else depth
                total[0] += traffic.requests * traffic.tokens(used)
                total[1] += traffic.seconds(used)
    speeds = {depth: tokens / seconds for depth, (tokens, seconds) in totals.items()}
    assert speeds.pop(None) >= ENOUGH * max(speeds.values())


def test_a_batch_size_whose_steps_never_follow_one_another_has_the_depth_of_the_nearest_that_is_timed():
    few, many = (Traffic(requests, BADLY, costs(10e-3, 3e-3, drafting=2e-3)) for requests in (12, 16))
    server = Simulation()
    server.step(few)
    server.serve(many, 400)
    assert [server.policy.depths.states[size].depth for size in (12, 16)] == [3, 0]
    for _ in range(32):
        server.prefill(20e-3)
        server.step(few)
    assert server.policy.depths.states[12].depth == 0
