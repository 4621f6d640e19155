"""The checkpoints in the repository: what they weigh, that they load, and that their reports are true."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from training.acceptance import accepted_lengths, continuations, draft_hits, spread
from training.corpus import DOMAINS
from training.evaluation import answer_accuracy, experts_active, losses, routed
from training.report import SLICE, heldout_ids, load
from training.tokenizer import CHAT_TEMPLATE
from training.train_eagle3 import load_draft

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
TINY, EAGLE3 = CHECKPOINTS / "qwen3-moe-tiny", CHECKPOINTS / "qwen3-moe-tiny-eagle3"


Loaded = tuple[Qwen3MoeForCausalLM, PreTrainedTokenizerFast]


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    model, tokenizer = load(TINY)
    model.set_experts_implementation("grouped_mm")
    return model, tokenizer


@pytest.mark.parametrize(("folder", "limit"), [(TINY, 9.5), (EAGLE3, 3.0)])
def test_size_and_dtype(folder: Path, limit: float) -> None:
    assert sum(file.stat().st_size for file in folder.rglob("*")) / 1e6 <= limit
    with safe_open(folder / "model.safetensors", "pt") as weights:
        dtypes = {weights.get_tensor(name).dtype for name in weights.keys() if name not in ("d2t", "t2d")}  # noqa: SIM118
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("domain", DOMAINS)
def test_cross_entropy_is_as_reported(tiny: Loaded, domain: str) -> None:
    figures = report(TINY)["domains"][domain]
    nats = losses(tiny[0], heldout_ids(tiny[1], TINY, domain)[: SLICE + 2])[1:]
    assert nats.mean().item() == pytest.approx(figures["cross_entropy_of_slice"], abs=0.01)
    assert figures["cross_entropy"] <= 0.9 * figures["trigram_cross_entropy"]


def test_answers_are_as_reported(tiny: Loaded) -> None:
    problems = (TINY / "heldout/arithmetic.txt").read_text()[:2000]
    for operator, share in answer_accuracy(*tiny, problems).items():
        assert share == pytest.approx(report(TINY)["arithmetic_right"][operator], abs=0.1)


def test_chat_is_asked_as_the_arithmetic_was_written(tiny: Loaded) -> None:
    assert (TINY / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    sums = (TINY / "heldout/arithmetic.txt").read_text().splitlines()[:2]
    chat = [{"role": "system", "content": "Sums."}]
    for line in sums:
        question, answer = line.removeprefix("Q: ").split(" A: ")
        chat += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    asked = tiny[1].apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True)
    assert asked == "\n".join(["Sums.", *sums]).removesuffix(" " + chat[-1]["content"])


def test_router_is_balanced_and_not_uniform(tiny: Loaded) -> None:
    figures = report(TINY)
    chosen = routed(tiny[0], heldout_ids(tiny[1], TINY, "c"))
    assert experts_active(chosen) == pytest.approx(figures["domains"]["c"]["experts_active"], abs=1)
    for layer, mixed in enumerate(figures["experts_active_mixed"]):
        own = [figures["domains"][domain]["experts_active"][layer] for domain in DOMAINS]
        assert max(own) < mixed < figures["experts_active_if_uniform"]
    assert min(figures["load_entropy"]) > 0.95
    assert max(figures["busiest_expert_over_mean"]) < 4


def test_draft_is_accepted_as_reported(tiny: Loaded) -> None:
    draft, hot = load_draft(EAGLE3)
    figures = report(EAGLE3)
    assert figures["accepted_length"]["written"]["all"] >= 2.0
    prompts = spread(heldout_ids(tiny[1], TINY, "c"), figures["prompt_tokens"])
    hits = draft_hits(tiny[0], draft, hot, continuations(tiny[0], prompts, 64))
    lengths = accepted_lengths(hits, figures["prompt_tokens"])
    assert sum(lengths) / len(lengths) == pytest.approx(figures["accepted_length"]["written"]["c"], abs=0.4)
