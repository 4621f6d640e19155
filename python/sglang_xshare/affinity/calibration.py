"""Signatures of token ids, from counts of the experts that a model routes each id to while the model reads texts."""

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
"""Dimensions of a signature."""
LENGTH = 256
"""Tokens of a piece of text."""
BATCH = 8
"""Pieces in one forward."""
SAMPLES = 256
"""Pieces of text whose signatures a table contains: 16 kB at 32 dimensions."""
WIDTH = 256
"""Numbers in a token id's sketch, a random projection of how often each expert gets the id: exact counts of 152k ids in
48 layers of 128 experts would take 3.7 GB.
"""
SHRINKAGE = 20
"""Occurrences with the mean counts that are added to every id, so an id that occurs once has a small signature."""


def load_model(folder: Path, device: str) -> Any:
    """Return the model of a checkpoint. Raises ValueError if `folder` does not contain all of it."""
    from transformers import AutoModelForCausalLM

    # Few CPUs multiply bfloat16 faster than float32.
    dtype = torch.float32 if device == "cpu" else "auto"
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--model {folder}: must be a whole checkpoint ({error})") from None


def read_texts(texts: Path, model: Path, length: int, most: int) -> torch.Tensor:
    """Return pieces [pieces, length] of token ids of every `*.txt` in `texts`, at most `most` tokens of each file.

    Raises ValueError without a tokenizer, and if no file fills a piece.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {model}: must be a whole checkpoint; no tokenizer ({error})") from None
    pieces = [torch.empty(0, length, dtype=torch.long)]
    for file in sorted(texts.glob("*.txt")):
        ids = tokenizer(read_text("--texts", file), add_special_tokens=False, verbose=False)["input_ids"][:most]
        pieces.append(torch.tensor(ids[: len(ids) // length * length]).long().view(-1, length))
    found = torch.cat(pieces)
    if not len(found):
        raise ValueError(f"--texts {texts}: must be a folder with a *.txt of at least {length} tokens")
    return found


@torch.inference_mode()
def calibrate(
    model: Any,
    folder: Path,
    pieces: torch.Tensor,
    dimensions: int = DIMENSIONS,
    progress: Callable[[Sequence[torch.Tensor]], Iterable[torch.Tensor]] = iter,
) -> Table:
    """Return the table of `model`, loaded from `folder`, by its routing of `pieces` [pieces, length] of texts.

    Raises ValueError for a dense model.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    sums, counts = torch.zeros(vocabulary, WIDTH), torch.zeros(vocabulary)
    sketches: list[torch.Tensor] = []
    with watch_experts(model) as layers:
        for tokens in progress(pieces.split(BATCH)):
            layers.clear()
            model(tokens.to(model.device), use_cache=False, logits_to_keep=1)
            if not layers:
                reason = f"must be a Mixture-of-Experts model; no experts found in {type(model).__name__}"
                raise ValueError(f"--model {folder}: {reason}")
            sketches = sketches or [make_sketch(experts, number) for number, (_, experts) in enumerate(layers)]
            for sketch, (ids, _) in zip(sketches, layers, strict=True):
                sums.index_add_(0, tokens.flatten(), sketch[ids].sum(1))
            counts += tokens.flatten().bincount(minlength=vocabulary)
    signatures = project(sums, counts, dimensions).to(torch.float16).numpy()
    return Table(signatures, _sample(signatures, pieces), describe_model(model.config.get_text_config(), folder))


@contextmanager
def watch_experts(model: Any) -> Iterator[list[tuple[torch.Tensor, int]]]:
    """Yield a list to which each MoE layer of a forward appends (expert ids [tokens, top-k], number of experts).

    Transformers calls each layer's module `experts` with hidden states, ids and weights, whatever the router.
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
    """Return random directions [experts, WIDTH], one for each expert of a layer: sums keep the distances of counts."""
    draw = torch.Generator().manual_seed(layer)
    return torch.randn(experts, WIDTH, generator=draw) / WIDTH**0.5


def project(sums: torch.Tensor, counts: torch.Tensor, dimensions: int) -> torch.Tensor:
    """Return signatures [vocabulary, dimensions] float32: principal components of each id's deviation from the mean.

    `sums` [vocabulary, width]: for each id, the sum of its experts' sketches; `counts` [vocabulary]: its occurrences.
    An id without occurrences has signature 0.
    """
    mean = sums.sum(0) / counts.sum()
    apart = (sums - counts[:, None] * mean) / (counts + SHRINKAGE)[:, None]
    spread = apart.T @ (counts[:, None] * apart)
    directions = torch.linalg.eigh(spread.double()).eigenvectors[:, -dimensions:].flip(1).float()
    # The sign of an eigenvector depends on the library, so its largest element is made positive.
    directions *= directions.gather(0, directions.abs().argmax(0, keepdim=True)).sign()
    return apart @ directions


def _sample(signatures: np.ndarray, pieces: torch.Tensor) -> np.ndarray:
    """Return unit signatures [samples, dimensions] float16 of evenly spaced pieces."""
    rows = torch.linspace(0, len(pieces) - 1, min(SAMPLES, len(pieces))).long()
    means = signatures[pieces[rows].numpy()].mean(1, dtype=np.float32)
    lengths = np.linalg.norm(means, axis=1, keepdims=True)
    return (means / np.maximum(lengths, 1e-6)).astype(np.float16)
