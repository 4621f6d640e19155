"""Reading the stage's counters off a /metrics page: differences between two looks, summed over ranks."""

from benchmark.common.evidence import Evidence, evidence_between, read_settled_totals, read_totals

PAGE = """\
# HELP sglang:expert_policy_layer_steps_total MoE layer calls
# TYPE sglang:expert_policy_layer_steps_total counter
sglang:expert_policy_layer_steps_total{{tp_rank="0"}} {layer_steps}
# TYPE sglang:expert_policy_experts_before_total counter
sglang:expert_policy_experts_before_total{{tp_rank="0"}} {before}
# TYPE sglang:expert_policy_experts_after_total counter
sglang:expert_policy_experts_after_total{{tp_rank="0"}} {after}
# TYPE sglang:expert_policy_kept_mass_total counter
sglang:expert_policy_kept_mass_total{{tp_rank="0"}} {mass}
# TYPE sglang:expert_policy_rows_total counter
sglang:expert_policy_rows_total{{tp_rank="0"}} {rows}
# TYPE sglang:expert_policy_steps_total counter
sglang:expert_policy_steps_total{{outcome="policy",tp_rank="0"}} {policy}
sglang:expert_policy_steps_total{{outcome="prefill",tp_rank="0"}} 3.0
sglang:expert_policy_steps_total{{outcome="prefill",tp_rank="1"}} 4.0
# TYPE sglang:expert_policy_acceptance gauge
sglang:expert_policy_acceptance{{tp_rank="0"}} 99.0
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs 2.0
"""


class Page:
    """A server as far as /metrics goes."""

    def __init__(self, **counts):
        self.text = PAGE.format(**counts)

    def get(self, path):
        assert path == "/metrics"
        return self.text


def test_means_over_what_was_counted_between_two_looks():
    first = read_totals(Page(layer_steps=10, before=700, after=300, mass=90.0, rows=100, policy=5))
    second = read_totals(Page(layer_steps=30, before=2100, after=940, mass=250.0, rows=300, policy=15))
    assert evidence_between(first, second) == Evidence(70.0, 32.0, 0.8, 10)
    assert evidence_between({}, first) == Evidence(70.0, 30.0, 0.9, 5)


def test_totals_are_read_once_they_stand_still():
    counts = iter([1, 3, 5, 5, 7])

    class Growing:
        def get(self, path):
            return Page(layer_steps=next(counts), before=0, after=0, mass=0, rows=0, policy=0).get(path)

    assert read_settled_totals(Growing())["layer_steps"] == 5
