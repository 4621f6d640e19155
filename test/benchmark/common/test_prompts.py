"""Prompts from held-out text: as many and as long as asked for, of every domain, other ones every round."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmark.common.rounds import write_prompts

WORDS = [f"{domain}{number}" for domain in ("c", "py") for number in range(40)]


@pytest.fixture
def tokenizer(tmp_path):
    """A folder with a tokenizer of one token a word."""
    tokens = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for domain in ("c", "py"):
        words = [word for word in WORDS if word.startswith(domain)]
        (folder / f"{domain}.txt").write_text("".join(f"{word}\n" for word in words))
    return folder


def read(path):
    return [json.loads(line)["conversations"][0]["value"] for line in path.read_text().splitlines()]


def test_prompts_are_distinct_of_one_length_and_of_every_domain(tmp_path, texts, tokenizer):
    write_prompts(tmp_path / "p.jsonl", texts, tokenizer, count=20, tokens=5, seed=1)
    prompts = read(tmp_path / "p.jsonl")
    assert len(set(prompts)) == 20
    assert {len(prompt.split()) for prompt in prompts} == {5}
    assert sum(prompt.startswith("py") for prompt in prompts) == 10


def test_too_little_text_is_refused(tmp_path, texts, tokenizer):
    with pytest.raises(ValueError, match="72 distinct prompts of 5 tokens; needed are 1000"):
        write_prompts(tmp_path / "p.jsonl", texts, tokenizer, count=1000, tokens=5, seed=1)
    with pytest.raises(ValueError, match=r"no \*.txt file"):
        write_prompts(tmp_path / "p.jsonl", tokenizer, tokenizer, count=1, tokens=5, seed=1)
