"""What the pages promise of their examples; their commands, links and paths are checked by `docs.check`."""

import json
import re

from benchmark.common.paths import RESULTS
from benchmark.common.record import read_record
from benchmark.common.speculative import DRAFTING
from benchmark.common.variant import parse_plan
from benchmark.records.experiments import EXPERIMENTS
from benchmark.serving.report import quality_key
from docs.documents import ROOT
from sglang_xshare import build_plan
from sglang_xshare.policies import get_policy


def test_every_example_of_a_policy_is_measured_or_warned_of():
    """Each setting of the guide's table has its row in a record of quality, in decoding or in verification."""
    records = [EXPERIMENTS[name] for name in ("quality", "serving", "drafts-1x8", "defaults-verified")]
    decoded, *verified, settings = (read_record(one.path(RESULTS), one.kind)["points"] for one in records)
    measured = [parse_plan(policy) for policy in decoded]
    drafted = quality_key(DRAFTING)
    keys = [key for points in verified for key in points if key.startswith(drafted)]
    measured += [parse_plan(key.removeprefix(drafted)) for key in keys]
    budgets = {point["setting"] for point in settings.values()}
    measured += [parse_plan(f"xshare:k0=1,{budget}") for budget in budgets if " " not in budget]
    guide = (ROOT / "docs" / "guide.md").read_text()
    rows = re.findall(r"^\| (`[a-z-]+`.*?) \| (.*?) \| (.*) \|$", guide, re.MULTILINE)
    examples = [
        (build_plan(name, **json.loads(keys)), meaning)
        for names, spelt, meaning in rows
        for name, keys in zip(re.findall(r"`(.*?)`", names), re.findall(r"`({.*?})`", spelt), strict=False)
        if get_policy(name).selects
    ]
    assert len(examples) >= 10
    assert [plan for plan, meaning in examples if plan not in measured and "Warning:" not in meaning] == []
