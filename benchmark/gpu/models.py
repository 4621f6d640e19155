"""Checkpoints without weights, which contain only the configurations of real models (`configs/`).

They are served with `--load-format dummy`. The speed is realistic, because the shapes are real. The weights are random,
so the quality cannot be measured. `dummy_server` makes the routing realistic.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from benchmark.common.paths import ROOT

MODELS = ROOT / "build" / "gpu" / "models"
TEXT_LINES = 1024
LAYERS = re.compile(r"-(\d+)-layers$")
COMMON: dict[str, Any] = {"dtype": "bfloat16", "transformers_version": "5.0.0", "tie_word_embeddings": False}

CONFIGS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "configs").glob("*.json"))
}
"""The published configurations by name.

`gpt-oss-120b-eagle3` is a draft model with one dense layer, which reads three hidden states of gpt-oss-120b.
"""


def read_config(name: str) -> dict[str, Any]:
    """Return the configuration of a model. A name such as `NAME-12-layers` means only the first 12 layers."""
    cut = LAYERS.search(name)
    if cut is None:
        return CONFIGS[name]
    config, layers = CONFIGS[LAYERS.sub("", name)], int(cut[1])
    types = {"layer_types": config["layer_types"][:layers]} if "layer_types" in config else {}
    return config | types | {"num_hidden_layers": layers}


def write_model(name: str, folder: Path = MODELS) -> Path:
    """Write the checkpoint folder of a model and return it.

    The folder contains config.json and a tokenizer in which token i is the word "t<i>".
    """
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    config = COMMON | read_config(name)
    vocabulary = {f"t{i}": i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n')
    (place / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return place


def write_texts(name: str, tokens: int, folder: Path = MODELS) -> Path:
    """Write a file of random text and return its folder. Each line has `tokens` tokens."""
    place = folder / name / "texts"
    place.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    words = [f"t{draw.randrange(read_config(name)['vocab_size'])}" for _ in range(TEXT_LINES * tokens)]
    lines = (" ".join(words[i : i + tokens]) + "\n" for i in range(0, len(words), tokens))
    (place / "random.txt").write_text("".join(lines))
    return place
