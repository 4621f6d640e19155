"""Models that transformers lacks, served for real: beside the release without our patches, and beside the reference."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from served import recent
from served.answers import generate_together, install_plugin, make_server, policy, read_lines
from served.family import EXPERTS
from served.probe import read_logits
from served.recent import RECENT, VOCABULARY
from served.release import LATEST
from sglang_xshare import build_plan, select

FULL, BUDGET = 7, 16
"""Requests at once."""
PLAN: dict[str, Any] = {"k0": 1, "add": 4}
WIDE: dict[str, Any] = {"k0": 1, "add": EXPERTS, "utility": "full"}
FLAGS = policy("xshare", **PLAN, by_rows={str(FULL): WIDE})
every_model = pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in RECENT])


@dataclass(frozen=True)
class Run:
    """What two servers answered to as many requests: our patched release, and the pristine one."""

    full: list[list[int]]
    budget: list[list[int]]
    off: list[list[int]]
    """Of the patched release, with the policy off, to as many requests as the most."""
    pristine: list[list[int]]
    calls: list[dict[str, Any]]
    """Of the MoE runner while the policy was on."""


@pytest.fixture(scope="session")
def run(
    tiny_model: Path,
    patched_release: Callable[[str], Path],
    pristine_release: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Run]:
    """Call it with the name of a model: each is served twice, one server after the other."""

    @cache
    def serve(name: str) -> Run:
        scratch, model = tmp_path_factory.mktemp("recent"), RECENT[name]
        (scratch / "model").mkdir()
        (scratch / "model" / "config.json").write_text(json.dumps(dict(model.config)))
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(1, VOCABULARY, (BUDGET, 8), generator=generator).tolist()
        plain = (*recent.FLAGS, *model.flags, "--tokenizer-path", str(tiny_model))

        def answer(tree: Path, flags: tuple[str, ...], *sizes: int) -> tuple[list[Any], list[dict[str, Any]]]:
            folder = scratch / tree.parent.name
            install_plugin(folder, "served.recent:lend")
            server, probe, _ = make_server(scratch / "model", tree, (*plain, *flags), folder, model.env)
            with server:
                answers = [generate_together(server, probe, prompts[:size]) for size in sizes]
                calls = read_lines(probe)
                if flags:
                    server.post("/expert_policy", {"policy": "vanilla"})
                    answers.append(generate_together(server, probe, prompts))
            return [[one["output_ids"] for one in batch] for batch in answers], calls

        (full, budget, off), calls = answer(patched_release(LATEST), FLAGS, FULL, BUDGET)
        (pristine,), _ = answer(pristine_release(LATEST), (), BUDGET)
        return Run(full, budget, off, pristine, calls)

    return serve


@every_model
def test_what_no_policy_cuts_is_answered_as_by_the_pristine_release(name, run):
    served = run(name)
    assert served.off == served.pristine
    assert served.full == served.pristine[:FULL]
    assert served.budget != served.pristine
    assert len({token for answer in served.pristine for token in answer}) > 100, "answers too poor to tell anything"


@every_model
def test_it_selects_as_the_reference(name, run):
    decoded = [call for call in run(name).calls if call["mode"] == "DECODE"]
    assert {(call["layer"], call["rows"]) for call in decoded} == {
        (layer, rows) for layer in RECENT[name].layers for rows in (FULL, BUDGET)
    }
    for call in decoded:
        plan = build_plan("xshare", **(WIDE if call["rows"] == FULL else PLAN))
        selection = select(read_logits(call), plan, RECENT[name].read_router(call["layer"]), backend="reference")
        assert call["active"] == selection.active.nonzero().flatten().tolist()
        assert (call["after"] < selection.vanilla_active.sum()) == (call["rows"] == BUDGET)
