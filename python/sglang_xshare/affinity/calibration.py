"""Which experts a model's token ids are routed to, counted while it reads texts, as signatures of a few dimensions."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from ..files import read_text
from .table import Table, describe_model

DIMENSIONS = 32
"""Of a signature."""
LENGTH = 256
"""Tokens of a piece of text."""
BATCH = 8
"""Pieces that are read together."""
SAMPLES = 256
"""Pieces of text whose signatures a table keeps: 16 kB at 32 dimensions."""
WIDTH = 256
"""Of the random sketch in which experts are counted: by expert, 152k ids in 48 layers of 128 would take 3.7 GB."""
SHRINKAGE = 20
"""Mean tokens that every id is mixed with, so that one seen once says little."""


def load_model(folder: Path, device: str) -> Any:
    """A checkpoint of transformers. Raises ValueError where `folder` does not hold all of one."""
    from transformers import AutoModelForCausalLM

    # Few CPUs multiply bfloat16 faster.
    dtype = torch.float32 if device == "cpu" else "auto"
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--model {folder}: {error}; allowed is a whole checkpoint") from None


def read_texts(texts: Path, model: Path, length: int, most: int) -> torch.Tensor:
    """Pieces [pieces, length] of token ids of every `*.txt` in the folder `texts`, at most `most` tokens of each.
    Raises ValueError without a tokenizer, and where no file fills a piece.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {model}: no tokenizer ({error}); allowed is a whole checkpoint") from None
    pieces = [torch.empty(0, length, dtype=torch.long)]
    for file in sorted(texts.glob("*.txt")):
        ids = tokenizer(read_text("--texts", file), add_special_tokens=False, verbose=False)["input_ids"][:most]
        pieces.append(torch.tensor(ids[: len(ids) // length * length]).long().view(-1, length))
    found = torch.cat(pieces)
    if not len(found):
        raise ValueError(f"--texts {texts}: no folder with *.txt of {length} tokens; allowed are longer texts")
    return found


@torch.inference_mode()
def calibrate(
    model: Any,
    folder: Path,
    pieces: torch.Tensor,
    dimensions: int = DIMENSIONS,
    progress: Callable[[Sequence[torch.Tensor]], Iterable[torch.Tensor]] = iter,
) -> Table:
    """Let `model`, `folder`'s, read `pieces` [pieces, length]. Raises ValueError where no experts can be seen."""
    vocabulary = model.get_input_embeddings().num_embeddings
    sums, counts = torch.zeros(vocabulary, WIDTH), torch.zeros(vocabulary)
    sketches: list[torch.Tensor] = []
    with watch_experts(model) as layers:
        for tokens in progress(pieces.split(BATCH)):
            layers.clear()
            model(tokens.to(model.device), use_cache=False, logits_to_keep=1)
            if not layers:
                reason = f"no experts seen in {type(model).__name__}; allowed is a Mixture-of-Experts model"
                raise ValueError(f"--model {folder}: {reason}")
            sketches = sketches or [make_sketch(experts, number) for number, (_, experts) in enumerate(layers)]
            for sketch, (ids, _) in zip(sketches, layers, strict=True):
                sums.index_add_(0, tokens.flatten(), sketch[ids].sum(1))
            counts += tokens.flatten().bincount(minlength=vocabulary)
    signatures = project(sums, counts, dimensions).to(torch.float16).numpy()
    return Table(signatures, _sample(signatures, pieces), describe_model(model.config.get_text_config(), folder))


@contextmanager
def watch_experts(model: Any) -> Iterator[list[tuple[torch.Tensor, int]]]:
    """A list that gets (expert ids [tokens, top-k], number of experts) for every MoE layer of a forward, in order:
    transformers calls each layer's module `experts` with hidden states, ids and weights, whatever the router.
    """
    seen: list[tuple[torch.Tensor, int]] = []

    def note(module: Any, args: tuple[Any, ...]) -> None:
        if len(args) > 1 and isinstance(args[1], torch.Tensor) and not args[1].is_floating_point():
            seen.append((args[1].cpu(), len(next(module.parameters()))))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name.endswith("experts"):
                stack.callback(module.register_forward_pre_hook(note).remove)
        yield seen


def make_sketch(experts: int, layer: int) -> torch.Tensor:
    """Random directions [experts, WIDTH] of one layer's experts: sums of them keep the distances of counts."""
    draw = torch.Generator().manual_seed(layer)
    return torch.randn(experts, WIDTH, generator=draw) / WIDTH**0.5


def project(sums: torch.Tensor, counts: torch.Tensor, dimensions: int) -> torch.Tensor:
    """Signatures [vocabulary, dimensions] float32, the principal components of what sets ids apart; 0 for one never
    seen. `sums` [vocabulary, width]: sketches of an id's experts, summed; `counts` [vocabulary]: how often it was seen.
    """
    mean = sums.sum(0) / counts.sum()
    apart = (sums - counts[:, None] * mean) / (counts + SHRINKAGE)[:, None]
    spread = apart.T @ (counts[:, None] * apart)
    directions = torch.linalg.eigh(spread.double()).eigenvectors[:, -dimensions:].flip(1).float()
    # An eigenvector's sign depends on the library.
    directions *= directions.gather(0, directions.abs().argmax(0, keepdim=True)).sign()
    return apart @ directions


def _sample(signatures: np.ndarray, pieces: torch.Tensor) -> np.ndarray:
    """Unit signatures [samples, dimensions] float16 of pieces, evenly taken."""
    rows = torch.linspace(0, len(pieces) - 1, min(SAMPLES, len(pieces))).long()
    means = signatures[pieces[rows].numpy()].mean(1, dtype=np.float32)
    lengths = np.linalg.norm(means, axis=1, keepdims=True)
    return (means / np.maximum(lengths, 1e-6)).astype(np.float16)
