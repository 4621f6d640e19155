"""A policy runs only on a tree that this version of the patch queue made."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from served.release import LATEST, make_env
from sglang_xshare.compatibility import checks
from sglang_xshare.compatibility.checks import CHECKS, Start
from sglang_xshare.patching.tree import PatchError
from sglang_xshare.refusal import ExpertPolicyError

CHECK = """
from types import SimpleNamespace
from sglang_xshare import hooks
hooks.check_flags(SimpleNamespace(expert_policy="xshare", speculative_algorithm=None, disaggregation_mode="null",
                                  moe_runner_backend="auto", moe_a2a_backend="none", device="cpu"))
"""


def check(tree: Path) -> str:
    """What the stage says to a policy on this tree; "" where it accepts it."""
    done = subprocess.run([sys.executable, "-c", CHECK], env=make_env(tree), capture_output=True, text=True)
    assert done.returncode == (1 if done.stderr else 0)
    return done.stderr.strip()


@pytest.fixture
def patched_copy(patched_release, tmp_path):
    """A patched tree to spoil: the files it shares with others are replaced, never written to."""
    shutil.copytree(patched_release(LATEST), tmp_path / "tree", copy_function=os.link)
    return tmp_path / "tree"


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.unlink()
    file.write_text(text.replace(old, new))


def test_a_tree_of_another_version_of_the_queue_or_edited_since_is_refused(patched_copy):
    assert check(patched_copy) == ""
    state = patched_copy / "sglang" / ".xshare" / "state.json"
    queue = json.loads(state.read_text())["queue"]
    replace(state, queue, "0" * 64)
    said = check(patched_copy)
    assert said.startswith(
        f"--expert-policy: SGLang {LATEST} in {patched_copy} is patched by another version of the queue"
    )
    assert said.endswith(f"run `sglang-xshare patch apply --target {patched_copy}`")
    assert "\n" not in said
    called, router = "expert_policy.route(topk_config, router_logits)", "sglang/srt/layers/moe/topk.py"
    replace(patched_copy / router, called, "topk_config")
    said = check(patched_copy)
    assert f"{patched_copy}/{router}: edited after it was patched" in said
    assert "\n" not in said


def test_the_flag_that_needs_the_patches_is_named(monkeypatch):
    def refuse() -> None:
        raise PatchError("SGLang is unpatched; run ...")

    monkeypatch.setattr(checks, "check_patched", refuse)
    listed = {check.name: check.run for check in CHECKS}
    for name, flags, named in (
        ("tree", {"expert_policy": "xshare"}, "--expert-policy"),
        ("tree", {"mask_padding_experts": True}, "--mask-padding-experts"),
        ("affinity's tree", {}, "--load-balance-method expert_affinity"),
    ):
        with pytest.raises(ExpertPolicyError, match=f"^{named}: SGLang is unpatched"):
            listed[name](Start(SimpleNamespace(**flags)))
