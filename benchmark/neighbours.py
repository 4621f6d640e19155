"""Measure how other requests change an answer: `python -m benchmark.neighbours [POLICY...]`.

A server answers each prompt twice with greedy sampling: first alone, then in one batch with other prompts. The server
is switched from policy to policy. It runs in float32, so a difference comes from the policy and not from rounding.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmark.common.command import Parser, run_main, selecting
from benchmark.common.paths import BUILD, TEXTS, TRAINED
from benchmark.common.server import Server
from benchmark.common.table import Table
from benchmark.common.variant import BASELINE, parse_variant
from benchmark.quality.text import load_sequences

POLICIES = ("xshare:k0=1,add=24", "xshare:k0=1,add=6")
NOTE = """\
{prompts} prompts of {prompt} tokens of held-out text, {tokens} greedy tokens each, of the shipped checkpoint in
float32: alone, and in one batch with {others} others. From token: the median place of the first token that differs.
Alone, unlike vanilla's: answers to a request alone that differ from those under vanilla."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the table."""
    parser = Parser("benchmark.neighbours", __doc__)
    parser.add_policies(selecting, POLICIES, f"beside {BASELINE}")
    parser.add_count("prompts", 24, "prompts")
    parser.add_count("others", 12, "requests that are decoded beside one")
    parser.add_count("prompt", 32, "tokens a prompt")
    parser.add_count("tokens", 64, "tokens an answer")
    parser.add_record(BUILD / "neighbours")
    args = parser.parse_args(argv)
    record = parser.open_record("neighbours", args, argv)
    policies = [BASELINE, *dict.fromkeys(args.policies)]
    missing = [name for name in policies if name not in record]
    if missing:
        count = args.prompts + args.others
        prompts = load_sequences(TEXTS, TRAINED, args.prompt, -(-count // 4)).mix().tokens[:count].tolist()
        asked, others = prompts[: args.prompts], prompts[args.prompts :]
        flags = ("--expert-policy", "observe", "--dtype", "float32", "--disable-radix-cache")
        shape = {name: getattr(args, name) for name in ("prompts", "others", "prompt", "tokens")}
        answers: dict[str, list[list[int]]] = {}
        with Server(TRAINED, flags, name="neighbours") as server:
            for name in dict.fromkeys([BASELINE, *missing]):  # every policy is compared with the baseline's answers
                server.post("/expert_policy", parse_variant(name).body())
                alone, beside = zip(*_answer(server, asked, others, args.tokens), strict=True)
                answers[name] = list(alone)
                places = [_find_first(*pair) for pair in zip(alone, beside, strict=True)]
                unlike = sum(one != own for one, own in zip(alone, answers[BASELINE], strict=True))
                record.add(name, shape=shape, first_differences=places, alone_unlike_vanilla=unlike)
                print(f"{name}: {sum(place is not None for place in places)} of {len(asked)} differ", flush=True)
    tabulate_neighbours(record.points).show(record.path)


def _answer(
    server: Server, asked: Sequence[list[int]], others: Sequence[list[int]], tokens: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield two answers to each prompt, as token ids: the answer alone, and the answer in a batch with the others."""
    for prompt in asked:
        batches = [prompt], [prompt, *others]
        found = (server.generate(batch, max_new_tokens=tokens, ignore_eos=True) for batch in batches)
        alone, beside = (answers[0]["output_ids"] for answers in found)
        yield alone, beside


def _find_first(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the position of the first different token, counted from 1, or None if all tokens are equal."""
    return next((place for place, pair in enumerate(zip(one, other, strict=True), 1) if pair[0] != pair[1]), None)


def tabulate_neighbours(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each policy."""
    rows = []
    for name, point in points.items():
        found = [place for place in point["first_differences"] if place is not None]
        count = point["shape"]["prompts"]
        first = f"{median(found):g}" if found else "-"
        rows.append([name, f"{len(found)} of {count}", first, f"{point['alone_unlike_vanilla']} of {count}"])
    headings = ["policy", "answers that differ", "from token", "alone, unlike vanilla's"]
    note = NOTE.format(**next(iter(points.values()))["shape"])
    return Table("Answers alone and beside others", headings, rows, note)


if __name__ == "__main__":
    run_main("neighbours", main)
