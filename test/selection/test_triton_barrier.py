"""How the Triton kernel's programs meet, executed on a CPU: they run as threads, in one launch.

Shown: several programs find what the reference finds, launch after launch at one counter; one that stops anywhere until
the others are stuck or through changes nothing; that takes the barrier, its release and its acquire, where nothing else
makes a store visible; nobody passes before all have arrived. Not shown,
without a GPU: that compiled code orders the threads within a program, what hardware makes of a fence, that a
cooperative launch is resident as a whole.
"""

from functools import partial

import pytest
import torch

from selection.concurrent import Conditions, cross, select_on_one_counter
from selection.interpreter import interpreted
from sglang_xshare import Batch, Router, RunnerSlots, build_plan, select

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: test_triton.py runs the barrier itself"
)
EXACT = ("topk_ids", "selected", "active", "vanilla_active", "rescued")
CLOSE = ("topk_weights", "kept_mass")
PLANS = {
    "add": {"policy": "xshare", "k0": 1, "add": 5},
    "add_per_request": {"policy": "xshare", "k0": 1, "add": 1, "add_per_request": 2},
    "mass": {"policy": "xshare", "k0": 1, "mass": 0.6, "utility": "full"},
    "votes": {"policy": "lynx-lat", "retain": 6},
    "budget": {"policy": "moe-spec", "budget": 6},
    "voters": {"policy": "lynx-acc", "confidence": 0.3, "max_voters": 3},
    "rescue": {"policy": "moe-spec", "budget": 1, "coverage": "truncate"},
    "votes beside exact rows": {"policy": "lynx-lat", "retain": 6},
}
TWICE = ("voters", "rescue")
"""Plans with a second barrier: programs exchange the rows' confidence before, or afterwards who is to be rescued."""
FLIPPED = -(2**31)  # the counter's top bit


@pytest.fixture(scope="module")
def run():
    """Call it with a function and its arguments, for the interpreter's process."""
    with interpreted() as run:
        yield run


def make_call(plan, programs, experts=16, seed=0):
    """What a `select()` takes that comes to so many programs of two rows: the last may be half empty."""
    rows = 2 * programs - (plan != "add_per_request")
    generator = torch.Generator().manual_seed(100 * seed + programs)
    logits = torch.randn((rows, experts), generator=generator)
    valid = torch.arange(rows) % 5 != 3 if seed % 2 else None
    exact = torch.arange(rows) % 3 == 1 if "exact" in plan else None
    return logits, build_plan(PLANS[plan]), Router(4), Batch(valid, 2 if plan == "add_per_request" else 1, exact)


def find_differences(found, call, slots=None):
    """The names of what the reference finds otherwise."""
    expected = select(*call, backend="reference", slots=slots)
    tests = dict.fromkeys(EXACT, torch.equal) | dict.fromkeys(CLOSE, partial(torch.allclose, atol=1e-6, rtol=2e-6))
    return [name for name, test in tests.items() if not test(getattr(found.selection, name), getattr(expected, name))]


@pytest.mark.parametrize("plan", PLANS)
def test_launch_after_launch_equals_the_reference(run, plan):
    """With other numbers of programs, in either memory, on what the launch before left in the counter."""
    sizes = (2, 8, 3, 5, 2, 4)
    calls = [make_call(plan, programs, 40 if programs == 3 else 16, seed) for seed, programs in enumerate(sizes)]
    conditions = [Conditions(lazy=turn in (1, 2, 4)) for turn in range(len(sizes))]
    for turn, found in enumerate(run(select_on_one_counter, list(zip(calls, conditions, strict=True)))):
        assert found.launches == [sizes[turn]]
        assert found.counters[0] == (0 if turn % 2 or plan in TWICE else FLIPPED)
        assert not any(found.counters[1:])
        assert not find_differences(found, calls[turn])


@pytest.mark.parametrize("late", [0, 1, 2])
def test_nobody_comes_too_late(run, late):
    """A program that stops before its votes, its arrival or what comes after, until the others are stuck or through."""
    places = [("load", 0), ("store", 0), ("store", 1), ("atomic", 0), ("atomic", 1), ("load", 1), ("store", 3)]
    call = make_call("add", 3)
    calls = [(call, Conditions(lazy=(turn + late) % 2 == 0, late=(late, *place))) for turn, place in enumerate(places)]
    for place, found in zip(places, run(select_on_one_counter, calls), strict=True):
        assert found.launches == [3]
        assert not find_differences(found, call), place


@pytest.mark.parametrize(
    "conditions",
    [
        pytest.param({"without": "barrier"}, id="barrier"),
        pytest.param({"without": "barrier", "lazy": True}, id="barrier in lazy memory"),
        pytest.param({"without": "release", "lazy": True}, id="release"),
        pytest.param({"without": "acquire", "lazy": True}, id="acquire"),
    ],
)
@pytest.mark.parametrize("late", [0, 1, 2])
def test_it_takes_all_of_the_barrier(run, conditions, late):
    """With a part left out the late program's votes are missing: the tests above can fail."""
    call = make_call("add", 3)
    (found,) = run(select_on_one_counter, [(call, Conditions(late=(late, "store", 0), **conditions))])
    assert find_differences(found, call)


def make_filled_call(programs=3):
    """(arguments, slots) with a program whose rows are both empty: others' experts fill them."""
    logits, plan, router, _ = make_call("add", programs)
    return (logits, plan, router, Batch(torch.arange(len(logits)) // 2 != 1)), RunnerSlots()


@pytest.mark.parametrize("late", [0, 1, 2])
def test_rows_are_filled_with_what_any_program_has_routed(run, late):
    """Whichever it is, launch after launch."""
    call, slots = make_filled_call()
    conditions = [
        Conditions(lazy=True, late=(late, "store", 1)),
        Conditions(lazy=True, late=(late, "end", 0)),
        Conditions(late=(late, "store", 4)),
    ]
    for found in run(select_on_one_counter, [(call, each) for each in conditions], FLIPPED, slots):
        assert found.launches == [3]
        assert not any(found.counters[1:])
        assert not find_differences(found, call, slots)


@pytest.mark.parametrize("start", [0, FLIPPED])
@pytest.mark.parametrize(("programs", "rounds"), [(2, 51), (5, 30), (8, 20), (64, 2)])
def test_nobody_passes_before_all_have_arrived(run, programs, rounds, start):
    """Barrier after barrier, by a clock that counts; each flips the counter's top bit and leaves the rest as it was."""
    crossing = run(cross, programs, rounds, start, Conditions())
    times = torch.cat((crossing.arrived, crossing.passed))
    assert times.unique().numel() == 2 * rounds * programs
    assert (crossing.arrived.amax(1) < crossing.passed.amin(1)).all()
    assert (crossing.counter != start) == (rounds % 2 == 1)
    assert crossing.counter in (0, FLIPPED)


def test_without_a_barrier_they_pass_at_once(run):
    crossing = run(cross, 4, 3, 0, Conditions(without="barrier", late=(2, "atomic", 0)))
    assert (crossing.passed[0, [0, 1, 3]] < crossing.arrived[0, 2]).all()


@pytest.mark.long  # the others have two seconds to arrive
def test_one_that_never_comes_holds_up_all(run):
    """As where not all programs of a launch are resident: so the launch has to be a cooperative one."""
    crossing = run(cross, 4, 1, 0, Conditions(seconds=2), 1)
    assert crossing.hung
    assert crossing.arrived[0, :3].sort().values.tolist() == [0, 1, 2]
    assert (crossing.passed == -1).all()


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize(("keys", "live", "barriers"), [({"add": 5}, 5, 1), ({"add": 0}, 2, 2), ({"add": 5}, 0, 2)])
def test_masked_logits_take_a_second_barrier_where_too_few_experts_are_known(run, keys, live, barriers, late):
    """Of the first choices of two rows no four slots can be filled: all then wait for what the others use."""
    logits, _, router, _ = make_call("add", 3)
    call = logits, build_plan("xshare", k0=1, **keys), router, Batch(torch.arange(len(logits)) < live)
    slots = RunnerSlots(masked=True)
    expected = select(*call, backend="reference", slots=slots)
    conditions = [Conditions(lazy=True, late=(late, *place)) for place in (("store", 1), ("load", 2), ("end", 0))]
    for turn, found in enumerate(run(select_on_one_counter, [(call, each) for each in conditions], 0, slots)):
        assert found.counters[0] == (FLIPPED if barriers == 1 and turn % 2 == 0 else 0)
        assert not find_differences(found, call, slots)
        assert torch.equal(found.selection.masked_logits, expected.masked_logits)
