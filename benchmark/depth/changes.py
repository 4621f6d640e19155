"""Measure how soon the draft depth follows a change of traffic: `python -m benchmark.depth.changes [POLICY]`.

One server with a policy decodes two kinds of batches in turns. They differ in the number of requests or in their texts.
During each batch, the program reads the depth and the number of verify steps from GET /expert_policy.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.common.command import Parser, folder, run_main, selecting
from benchmark.common.paths import BUILD, DRAFT, TEXTS, WIDENED
from benchmark.common.rounds import draw_prompts, serve
from benchmark.common.server import Server
from benchmark.common.table import Table
from benchmark.common.widened import prepare
from benchmark.depth.__main__ import PROMPT, list_variants
from benchmark.depth.report import FIXED

ALLOWED = 300
"""The maximum number of verify steps within which the depth must follow a change."""
Looks = Sequence[Sequence[int]]
"""The values that were read for a batch size: (verify steps since the change, current depth)."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the table."""
    parser = Parser("benchmark.depth.changes", __doc__)
    parser.add_argument("policy", nargs="?", type=selecting, default="xshare", help="of the server (default: xshare)")
    parser.add_checkpoint(WIDENED, TEXTS)
    parser.add_argument("--draft", type=folder, default=DRAFT, help="EAGLE-3 draft (default: the trained model's)")
    parser.add_argument("--other-texts", type=folder, help="folder of *.txt to change to (default: the same)")
    parser.add_count("from_requests", 16, "requests at a time before a change")
    parser.add_count("to_requests", 1, "requests at a time after it")
    parser.add_count("changes", 6, "changes there and back")
    parser.add_count("output_tokens", 1024, "tokens a request between two changes")
    parser.add_record(BUILD / "depth")
    args = parser.parse_args(argv)
    record = parser.open_record("changes", args, argv)
    sides = (args.from_requests, args.texts), (args.to_requests, args.other_texts or args.texts)
    variant = list_variants(args.policy, args.draft, FIXED, record.path.parent)[-1]
    if not all(str(number) in record for number in range(2 * args.changes)):
        with serve(args.model, [variant], prepare(args.model)) as (server,):
            for number in range(2 * args.changes):
                requests, texts = sides[number % 2]
                prompts = draw_prompts(texts, args.model, requests, PROMPT, number)
                looks = decode(server, prompts, args.output_tokens)
                record.add(str(number), requests=requests, texts=texts.name, looks=looks)
    tabulate_changes(record.points).show(record.path)
    for line in list_late(record.points):
        print(f"Missed: {line}")


def decode(server: Server, prompts: list[str], tokens: int) -> Looks:
    """Decode a batch of prompts, and return the values that were read for its batch size during this time."""
    found = [read_sizes(server)]
    thread = threading.Thread(
        target=server.generate, args=(prompts,), kwargs={"max_new_tokens": tokens, "ignore_eos": True}
    )
    thread.start()
    while thread.is_alive():
        found.append(read_sizes(server))
        time.sleep(0.05)
    thread.join()
    return follow(found, len(prompts))


def read_sizes(server: Server) -> dict[int, tuple[int, int]]:
    """Return the number of verify steps and the current depth for each batch size."""
    sizes: list[dict[str, Any]] = server.get("/expert_policy")["draft_depth"]["batch_sizes"]
    return {one["batch_size"]: (one["verifications"], one["depth"]) for one in sizes}


def follow(found: Sequence[Mapping[int, tuple[int, int]]], requests: int) -> Looks:
    """Return the values of the batch size that serves `requests` requests. Verify steps are counted from `found[0]`."""
    size = min((one for one in found[-1] if one >= requests), default=requests)
    begin = found[0].get(size, (0, 0))[0]
    return [(sizes[size][0] - begin, sizes[size][1]) for sizes in found[1:] if size in sizes]


def find_arrival(looks: Looks) -> int | None:
    """Return the number of verify steps until the server used its final depth, or None if nothing was read.

    The final depth is the most frequent one after `ALLOWED` verify steps. The returned number is never too small,
    because a change is noticed only at the next reading.
    """
    settled = [depth for count, depth in looks if count >= ALLOWED] or [depth for _, depth in looks]
    usual = max(sorted(set(settled)), key=settled.count, default=None)
    return next((count for count, depth in looks if depth == usual), None)


def list_late(points: Mapping[str, Any]) -> list[str]:
    """Return one line for each change that the depth followed too late."""
    arrivals = {number: find_arrival(point["looks"]) for number, point in points.items() if number != "0"}
    late = {number: count for number, count in arrivals.items() if count is None or count > ALLOWED}
    return [f"change {number}: {count} verifications, must be at most {ALLOWED}" for number, count in late.items()]


def tabulate_changes(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each change. The first batch has no row, because nothing changes before it."""
    rows = []
    for number, point in points.items():
        looks = point["looks"]
        if number != "0":
            depth = looks[-1][1] if looks else "-"
            rows.append([f"{point['requests']} at a time, {point['texts']}", str(depth), str(find_arrival(looks))])
    note = "Verifications of a batch size from the change until the server first used its final depth. Before it kept "
    note += f"this depth, the server may have tried other depths. The bound is {ALLOWED}."
    return Table("Changes of the traffic", ["to", "depth", "verifications"], rows, note)


if __name__ == "__main__":
    run_main("depth.changes", main)
