"""Prompts for bench_serving's `custom` dataset: the first tokens of lines of real, held-out text."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer


def write_prompts(out: Path, texts: Path, tokenizer: Path, count: int, tokens: int, seed: int) -> None:
    """Write `count` distinct prompts of `tokens` tokens, evenly from every text, as JSON lines to `out`.

    `texts` is a folder of *.txt files, each one domain, `tokenizer` one with tokenizer.json. Other seeds give other
    prompts, so that no round finds its prompts in the prefix cache. Raises ValueError for no text, or too little of it.
    """
    files = sorted(texts.glob("*.txt"))
    if not files:
        raise ValueError(f"texts {texts}: no *.txt file there; needed is a folder of held-out texts")
    encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    rng = random.Random(seed)
    domains = [_domain_prompts(encode, path, tokens) for path in files]
    for domain in domains:
        rng.shuffle(domain)
    prompts = list(dict.fromkeys(prompt for group in zip(*domains, strict=False) for prompt in group))[:count]
    if len(prompts) < count:
        raise ValueError(f"texts {texts}: {len(prompts)} distinct prompts of {tokens} tokens; needed are {count}")
    # bench_serving wants two turns; the second only matters where no output length is given.
    rows = [{"conversations": [{"value": prompt}, {"value": ""}]} for prompt in prompts]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _domain_prompts(encode: Tokenizer, path: Path, tokens: int) -> list[str]:
    """Every stretch of `tokens` tokens that starts at the beginning of a line."""
    lines = path.read_text().splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if line.strip()]
    # Eight lines hold any prompt we ask for; a stretch that ends early is left out.
    stretches = (encode.encode("".join(lines[i : i + 8])).ids[:tokens] for i in starts)
    return [encode.decode(ids) for ids in stretches if len(ids) == tokens]
