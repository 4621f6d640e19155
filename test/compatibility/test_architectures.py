"""Upstream's registry, walked: every class that can hold experts is judged, and the page says how many are tried."""

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

from benchmark.common.paths import ROOT
from compatibility.configured import model
from docs.families import PAGE, make_page
from fake_gpu.models import CONFIGS, HERE_ALONE
from served.family import FAMILIES
from served.gemma import GEMMA
from served.hub import ON_HUB
from served.hybrids import HYBRIDS
from served.recent import RECENT
from served.release import LATEST, older_releases_take_long
from sglang_xshare.compatibility.architectures import EXECUTED, GATHERED, UNSERVED
from sglang_xshare.compatibility.moe_model import read_model
from sglang_xshare.refusal import ExpertPolicyError

JUDGED = json.loads(Path(__file__).with_suffix("").with_name("architectures.json").read_text())
"""Classes of 0.5.17, 0.5.21 and 0.5.23 that can hold experts, by role, and dense ones in a file that builds some."""
BUILDS = re.compile(r"\bTopK\(|\bFusedMoE\b|get_moe_impl_class")


@cache
def list_classes(tree: Path) -> list[tuple[str, bool]]:
    """(a registered class, whether its file builds experts itself) of a release's models."""
    found: list[tuple[str, bool]] = []
    for file in sorted((tree / "sglang" / "srt" / "models").rglob("*.py")):
        source = file.read_text("utf-8-sig")
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                entries = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
                found += ((ast.unparse(entry), bool(BUILDS.search(source))) for entry in entries)
    return found


@older_releases_take_long
def test_every_class_that_can_hold_experts_is_judged(release, pristine_release):
    """One that a new release adds fails here, until someone has read how it routes."""
    known = {name for names in JUDGED.values() for name in names}
    classes = list_classes(pristine_release(release))
    assert [name for name, builds in classes if builds and name not in known] == []


@older_releases_take_long
def test_the_page_says_how_many_are_tried(release, pristine_release):
    registered = {name for name, _ in list_classes(pristine_release(release))}
    targets = registered & set(JUDGED["targets"])
    page = (ROOT / "docs" / "limits.md").read_text()
    assert f"{len(targets - set(UNSERVED))} of {len(targets)} on {release}" in page
    if release == LATEST:  # of which docs/limits.md names each
        assert targets == set(JUDGED["targets"])


def test_what_was_executed_is_what_real_servers_are_tested_with():
    """Each has its row in docs/limits.md, made from these."""
    families = {one.architecture: name for name, one in {**FAMILIES, **HYBRIDS, "Gemma 4": GEMMA}.items()}
    families |= {one.config["architectures"][0]: name for name, one in RECENT.items()}
    families |= {CONFIGS[model]["architectures"][0]: name for model, name in HERE_ALONE.items()}
    assert families == EXECUTED
    assert set(ON_HUB) == set(EXECUTED.values())
    assert PAGE.read_text() == make_page()


def test_the_named_classes_are_upstreams():
    assert set(UNSERVED) | set(EXECUTED) | GATHERED <= set(JUDGED["targets"])
    assert not set(UNSERVED) & GATHERED


@pytest.mark.parametrize("architecture", UNSERVED)
def test_a_class_that_is_known_not_to_be_served_is_refused_with_its_reason(architecture):
    with pytest.raises(ExpertPolicyError) as raised:
        read_model(model(architecture, num_experts=16, num_experts_per_tok=1), "path")
    assert (raised.value.flag, raised.value.value) == ("--model-path", "path")
    assert f"{architecture}: {UNSERVED[architecture]}" in str(raised.value)


def test_any_other_class_is_tried():
    assert read_model(model("MadeUpForCausalLM", num_experts=16, num_experts_per_tok=2), "path").top_k == 2
