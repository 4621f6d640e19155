"""A small random checkpoint of two MoE layers, with its tokenizer and two domains of text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from benchmark.common.record import Record, read_record
from benchmark.quality.decoding import Decoding
from benchmark.quality.model import load_model
from small import small_qwen3

EXPERTS, TOP_K = 16, 4
TEXTS = {
    "arithmetic": "".join(f"Q: {a} + {b} = ? A: {a + b}\n" for a in range(40) for b in range(10)),
    "prose": "".join(
        f"The {n}th line of this text says nothing that line {n - 1} did not say.\n" for n in range(1, 200)
    ),
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 experts, top-4, hidden 32; routers are decided enough that a policy changes the logits."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(small_qwen3(num_experts=EXPERTS, num_experts_per_tok=TOP_K))
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.4)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS.values(), trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    (folder / "heldout").mkdir()
    for name, text in TEXTS.items():
        (folder / "heldout" / f"{name}.txt").write_text(text)
    return folder


@pytest.fixture
def measure(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Call it with a command, its record's name and arguments for the points; resumed, it measures nothing more."""

    def run(main: Callable[[Sequence[str]], None], name: str, *arguments: str) -> dict[str, Any]:
        asked = [*arguments, "--model", str(checkpoint), "--out", str(tmp_path)]
        main(asked)
        with monkeypatch.context() as resumed:
            resumed.setattr(Record, "add", lambda *_, **__: pytest.fail("measured again"))
            main([*asked, "--resume"])
        return read_record(tmp_path / f"{name}.json", name)["points"]

    return run


@pytest.fixture
def model(checkpoint: Path) -> PreTrainedModel:
    """The checkpoint, loaded."""
    return load_model(checkpoint)


@pytest.fixture
def tokenizer(checkpoint: Path) -> Tokenizer:
    """The checkpoint's tokenizer."""
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


@pytest.fixture
def decoding(checkpoint: Path) -> Decoding:
    """Steps of 4 requests on the checkpoint's text."""
    return Decoding(checkpoint, checkpoint / "heldout", per_domain=4, prompt=8, steps=12, batch=4)
