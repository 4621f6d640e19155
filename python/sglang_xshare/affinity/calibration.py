"""The measurement of signatures. A model reads texts, and the experts of each token id are counted."""

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
"""The number of dimensions of a signature."""
LENGTH = 256
"""The number of tokens in a piece of text."""
BATCH = 8
"""The number of pieces in one forward."""
SAMPLES = 256
"""The most pieces of text whose signatures a table contains. They take 16 kB at 32 dimensions."""
WIDTH = 256
"""The number of elements in a token id's sketch. A sketch is a random projection of the counts of an id at all experts.
The exact counts of 152k ids, in 48 layers of 128 experts, would take 3.7 GB.
"""
SHRINKAGE = 20
"""The number of average tokens that are added to each id's occurrences. So an id that occurs once has a small
signature.
"""


def load_model(folder: Path, device: str) -> Any:
    """Return the model of the checkpoint in `folder`. Raises ValueError if the checkpoint is incomplete."""
    from transformers import AutoModelForCausalLM

    # On most CPUs, bfloat16 is not faster than float32.
    dtype = torch.float32 if device == "cpu" else "auto"
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--model {folder}: must be a whole checkpoint ({error})") from None


def read_texts(texts: Path, model: Path, length: int, most: int) -> torch.Tensor:
    """Return the token ids of the texts, as pieces [pieces, length].

    At most `most` tokens of every `*.txt` in the folder `texts` are read. Raises ValueError if the model has no
    tokenizer, or if no file is long enough for one piece.
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
    """Return the table of a model, measured while the model reads texts. Raises ValueError for a dense model.

    `folder` contains the model's checkpoint. `pieces` [pieces, length] contains the token ids of the texts.
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
    """Yield a list to which each MoE layer adds an entry during a forward of the model.

    An entry contains the layer's expert ids [tokens, top-k] and its number of experts. With any router, Transformers
    calls the layer's module `experts` with hidden states, ids and weights.
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
    """Return a random direction for each expert of a layer, as [experts, WIDTH].

    The distance between two sums of directions is nearly the distance between the counts of their experts.
    """
    draw = torch.Generator().manual_seed(layer)
    return torch.randn(experts, WIDTH, generator=draw) / WIDTH**0.5


def project(sums: torch.Tensor, counts: torch.Tensor, dimensions: int) -> torch.Tensor:
    """Return the signatures [vocabulary, dimensions] float32 of all token ids.

    A signature contains the principal components of an id's deviation from the mean token. An id without occurrences
    has signature 0. `sums` [vocabulary, width] contains the sum of the sketches of each id's experts. `counts`
    [vocabulary] contains the number of occurrences of each id.
    """
    mean = sums.sum(0) / counts.sum()
    apart = (sums - counts[:, None] * mean) / (counts + SHRINKAGE)[:, None]
    spread = apart.T @ (counts[:, None] * apart)
    directions = torch.linalg.eigh(spread.double()).eigenvectors[:, -dimensions:].flip(1).float()
    # The sign of an eigenvector depends on the library, so the element that is largest in size is made positive.
    directions *= directions.gather(0, directions.abs().argmax(0, keepdim=True)).sign()
    return apart @ directions


def _sample(signatures: np.ndarray, pieces: torch.Tensor) -> np.ndarray:
    """Return unit signatures [samples, dimensions] float16 of evenly spaced pieces."""
    rows = torch.linspace(0, len(pieces) - 1, min(SAMPLES, len(pieces))).long()
    means = signatures[pieces[rows].numpy()].mean(1, dtype=np.float32)
    lengths = np.linalg.norm(means, axis=1, keepdims=True)
    return (means / np.maximum(lengths, 1e-6)).astype(np.float16)
