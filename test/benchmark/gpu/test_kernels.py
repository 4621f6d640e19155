"""What the selection kernel is checked and timed on; without a GPU."""

from benchmark.common.variant import parse_plan
from benchmark.gpu import kernels
from sglang_xshare import Batch, Router
from sglang_xshare.selection.triton_kernel import supports


def test_every_case_is_served():
    for rows, experts, plan, _, _ in kernels.make_cases(kernels.PLANS):
        batch = Batch(tokens_per_request=4 if "per_request" in plan and rows % 4 == 0 else 1)
        assert supports(parse_plan(plan), Router(8), batch, rows, experts)
