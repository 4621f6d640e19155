"""A policy runs only on a tree that this version of the patch queue made; `patching/test_engine.py` has such trees."""

from types import SimpleNamespace

import pytest

from sglang_xshare.compatibility import checks
from sglang_xshare.compatibility.checks import CHECKS, GIVEN, Start
from sglang_xshare.patching.tree import PatchError
from sglang_xshare.refusal import ExpertPolicyError


def test_the_flag_that_needs_the_patches_is_named(monkeypatch):
    def refuse() -> None:
        raise PatchError("SGLang is unpatched; run ...")

    monkeypatch.setattr(checks, "check_patched", refuse)
    listed = {check.name: check.run for check in CHECKS if check.when == GIVEN}
    for name, flags, named in (
        ("tree", {"expert_policy": "xshare"}, "--expert-policy"),
        ("tree", {"mask_padding_experts": True}, "--mask-padding-experts"),
        ("affinity's tree", {}, "--load-balance-method expert_affinity"),
        ("depth's tree", {}, "--expert-policy-draft-depth"),
    ):
        with pytest.raises(ExpertPolicyError, match=f"^{named}: SGLang is unpatched"):
            listed[name](Start(SimpleNamespace(**flags)))
