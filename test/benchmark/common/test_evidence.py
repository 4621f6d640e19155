"""Reading the stage's counters off a /metrics page: differences between two looks, summed over ranks."""

from types import SimpleNamespace

from benchmark.common.evidence import Evidence, evidence_between, read_settled_totals, read_totals

OTHERS = """\
sglang:expert_policy_steps_total{outcome="prefill",tp_rank="0"} 3.0
sglang:expert_policy_steps_total{outcome="prefill",tp_rank="1"} 4.0
# TYPE sglang:expert_policy_acceptance gauge
sglang:expert_policy_acceptance{tp_rank="0"} 99.0
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs 2.0
"""


def make_page(policy: int = 0, **counts: float) -> str:
    """Return a page of a server of two ranks, of which the first has counted."""
    lines = [f'sglang:expert_policy_steps_total{{outcome="policy",tp_rank="0"}} {policy}\n', OTHERS]
    for name, count in counts.items():
        full = f"sglang:expert_policy_{name}_total"
        lines.append(f'# TYPE {full} counter\n{full}{{tp_rank="0"}} {count}\n{full}{{tp_rank="1"}} 0\n')
    return "".join(lines)


def serve(*pages: str) -> SimpleNamespace:
    """Return a server as far as /metrics goes, with these pages in turn."""
    rest = iter(pages)
    return SimpleNamespace(get=lambda path: next(rest))


def test_means_over_what_was_counted_between_two_looks():
    looks = [
        make_page(5, layer_steps=10, experts_before=700, experts_after=300, kept_mass=90.0, rows=100, page_ins=40),
        make_page(15, layer_steps=30, experts_before=2100, experts_after=940, kept_mass=250.0, rows=300, page_ins=100),
    ]
    first, second = (read_totals(serve(look)) for look in looks)
    assert first["steps:prefill"] == 7
    assert evidence_between(first, second) == Evidence(70.0, 32.0, 0.8, 10, 3.0)
    assert evidence_between({}, first) == Evidence(70.0, 30.0, 0.9, 5, 4.0)


def test_totals_are_read_once_they_stand_still():
    pages = [make_page(layer_steps=count) for count in (1, 3, 5, 5, 7)]
    assert read_settled_totals(serve(*pages))["layer_steps"] == 5
