"""What a running server is asked: texts of an offline decode and their answers, prompts of one's own, problems."""

import json

import pytest
import torch

from benchmark.quality.text import load_sequences
from benchmark.quality.traffic import Problem, continue_prompts, read_texts, share_batch


@pytest.fixture
def tokenize(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def test_problems_come_after_a_solved_one(decoding, tokenize):
    problems = read_texts(decoding, tokenize).problems
    assert problems[0] == Problem(tokenize("Q: 0 + 0 = ? A: 0\nQ: 0 + 1 = ? A:"), " 1\n")
    assert len(problems) == 4


def test_prompts_are_answered_by_the_server_first(decoding, tokenize, tmp_path):
    told = [{"prompt": f"The {n}th line", **({"answer": "yes"} if n == 2 else {})} for n in range(9)]
    asked = []

    def go_on(prompts, tokens):
        asked.append(len(prompts))
        return [list(range(5 if prompt == tokenize("The 1th line") else tokens)) for prompt in prompts]

    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in told))
    traffic = continue_prompts(file, decoding, tokenize, go_on)
    assert asked == [4, 4]
    assert [one.prompt for one in traffic.samples] == [tokenize(f"The {n}th line") for n in (0, 2, 3, 4)]
    assert all(one.text == list(range(13)) for one in traffic.samples)
    assert (traffic.domains, traffic.problems) == (("mine",) * 4, (Problem(tokenize("The 2th line"), "yes"),))
    assert traffic.mix() == traffic


def test_problems_share_their_batches():
    problems = [Problem([n], "") for n in range(5)]
    alone = share_batch(problems, [one.prompt for one in problems], own=4, batch=4)
    assert [(len(some), rows) for some, rows in alone] == [(4, [[0], [1], [2], [3]]), (1, [[4], [4], [0], [1]])]
    among = share_batch(problems, [[7], [8], [9]], own=2, batch=4)
    assert [rows for _, rows in among] == [[[0], [1], [7], [8]], [[2], [3], [9], [7]], [[4], [8], [9], [7]]]


@pytest.fixture
def sequences(checkpoint):
    return load_sequences(checkpoint / "heldout", checkpoint, length=40, per_domain=6)


def test_sequences_are_the_text_and_answers_stand_in_it(checkpoint, tokenizer, sequences):
    assert (sequences.tokens.shape, sequences.domains) == ((12, 40), ("arithmetic",) * 6 + ("prose",) * 6)
    texts = [tokenizer.decode(part.flatten().tolist()) for part in sequences.tokens.split(6)]
    for domain, text in zip(("arithmetic", "prose"), texts, strict=True):
        assert (checkpoint / "heldout" / f"{domain}.txt").read_text().startswith(text)
    told = [tokenizer.decode(sequences.tokens[one.row, one.start : one.stop].tolist()) for one in sequences.answers]
    # One cut by the end of a sequence is left out.
    assert texts[0].count("\n") - 6 <= len(told) <= texts[0].count("\n")
    problems = [line.split(" A:")[1] + "\n" for line in texts[0].splitlines() if " A:" in line]
    assert all(answer in problems for answer in told)
    assert told[:2] == [" 0\n", " 1\n"]


def test_what_is_skipped_is_left_out_of_every_domain(checkpoint, sequences):
    later = load_sequences(checkpoint / "heldout", checkpoint, length=40, per_domain=4, skip=2)
    kept = [2, 3, 4, 5, 8, 9, 10, 11]
    assert torch.equal(later.tokens, sequences.tokens[kept])
    assert later.answers == sequences.take(kept).answers
    with pytest.raises(ValueError, match=r"must have 420 sequences"):
        load_sequences(checkpoint / "heldout", checkpoint, length=40, per_domain=20, skip=400)


def test_mixing_takes_turns_and_answers_follow(sequences):
    order = [row for pair in zip(range(6), range(6, 12), strict=True) for row in pair]
    mixed = sequences.mix()
    assert mixed.domains == ("arithmetic", "prose") * 6
    assert torch.equal(mixed.tokens, sequences.tokens[order])
    spans = {tuple(sequences.tokens[one.row, one.start : one.stop].tolist()) for one in sequences.answers}
    assert {tuple(mixed.tokens[one.row, one.start : one.stop].tolist()) for one in mixed.answers} == spans
    assert {one.row for one in mixed.answers} == {0, 2, 4, 6, 8, 10}
