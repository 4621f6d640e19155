"""The settings of offline decoding and their command-line flags."""

import argparse
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

from transformers import PreTrainedModel

from benchmark.common.command import Parser
from benchmark.common.paths import TRAINED
from benchmark.quality.model import Layout, load_model
from benchmark.quality.text import Sequences, load_sequences

COUNTS = {
    "per_domain": "sequences of each domain",
    "prompt": "tokens a prompt, which keeps the model's own routing",
    "steps": "tokens a sequence under the policy",
    "batch": "sequences decoded together",
    "tokens_per_request": "consecutive tokens of a sequence in one step; above 1, drafts are verified",
}


@dataclass(frozen=True)
class Decoding:
    """The text that every policy decodes, and the sizes of the batches.

    `model` is the checkpoint folder with the tokenizer. `texts` is a folder of held-out `*.txt` files, one for each
    domain. `COUNTS` describes the numbers. `per_domain` must be a multiple of `batch`, and `steps` must be a multiple
    of `tokens_per_request`. The first `skip` sequences of each domain are skipped.

    Raises ValueError if a number is wrong. The error names the number's flag.
    """

    model: Path
    texts: Path
    per_domain: int = 32
    prompt: int = 64
    steps: int = 128
    batch: int = 16
    tokens_per_request: int = 1
    skip: int = 0

    def __post_init__(self) -> None:
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} must be a whole number above 0 (got {getattr(self, name)})")
        if self.skip < 0:
            raise ValueError(f"--skip must be at least 0 (got {self.skip})")
        for name, divisor in (("per_domain", "batch"), ("steps", "tokens_per_request")):
            if getattr(self, name) % getattr(self, divisor):
                whole = f"{_flag(divisor)} {getattr(self, divisor)}"
                raise ValueError(f"{_flag(name)} must be a multiple of {whole} (got {getattr(self, name)})")

    @property
    def layout(self) -> Layout:
        """Return the layout of each decode step."""
        return Layout(self.batch, self.tokens_per_request)

    def load(self) -> tuple[PreTrainedModel, Sequences]:
        """Load the model and the sequences. Raises ValueError if the model or a text cannot be used."""
        model = load_model(self.model)
        return model, load_sequences(self.texts, self.model, self.prompt + self.steps + 1, self.per_domain, self.skip)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_decoding(parser: Parser, counts: Collection[str] = tuple(COUNTS), **defaults: int) -> None:
    """Add flags for the model, its texts and these counts. `defaults` changes the default values of some counts."""
    parser.add_checkpoint(TRAINED)
    usual = {field.name: field.default for field in fields(Decoding)} | defaults
    for name in counts:
        parser.add_count(name, cast(int, usual[name]), COUNTS[name])


def read_decoding(args: argparse.Namespace, **fixed: int) -> Decoding:
    """Create the settings from parsed flags. `fixed` contains the numbers that have no flag."""
    counts = {name: fixed[name] if name in fixed else getattr(args, name) for name in COUNTS}
    return Decoding(args.model, args.texts or args.model / "heldout", **counts, skip=getattr(args, "skip", 0))
