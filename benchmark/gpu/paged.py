"""Experiment `paged`: eight layers of Qwen3-30B-A3B with half of their experts in slots, policy off and on.

SGLang refuses dummy weights with paged experts, so random weights are written to disk first. A server with all experts
in memory shows whether paging computes the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmark.common.comparison import format_number
from benchmark.common.record import Record
from benchmark.common.rounds import serve
from benchmark.common.server import Server, has_gpu
from benchmark.common.variant import OFF, Variant, parse_variant
from benchmark.gpu import memory, serving
from benchmark.gpu.models import PAGED_SINCE, read_config, write_model
from benchmark.gpu.serving import INPUT_TOKENS, SERVER_ARGS, Gain, Point, check_caches, is_complete, measure_rounds
from benchmark.gpu.table import Row
from benchmark.gpu.weights import write_weights
from sglang_xshare.patching.tree import find_tree
from sglang_xshare.upstream.release import is_since

PARTS = ()
MODEL = "qwen3-30b-a3b-8-layers"
POLICY = "xshare:k0=1,add=4,utility=squared,own_share=0.75"
SLOTS = 64
CONCURRENCIES = (16, 8, 4, 1)
PAGED = ("--enable-paged-experts", "--paged-experts-num-resident", str(SLOTS))
VARIANTS = (
    Variant("off, paged", None, {}, PAGED),
    Variant(f"{POLICY}, paged", "xshare", parse_variant(POLICY).keys, PAGED),
)
SAME, PROMPTS = "same", 8
FARTHEST = 0.1
"""Nats of a prompt's token at most between paged and not: sums of bf16 in another order differ by hundredths."""


def measure(record: Record, parts: Sequence[str]) -> None:
    """Compare a paged server with a whole one, then measure the concurrencies that the record lacks."""
    if not is_since(running := find_tree().release, PAGED_SINCE):
        raise ValueError(f"experiment paged: SGLang must be {PAGED_SINCE} or later (got {running})")
    points = [Point(_key(n), VARIANTS, n) for n in CONCURRENCIES if not is_complete(record, _key(n))]
    model = memory.fit_model(record, "paged", MODEL, len(VARIANTS) + 1) if points or SAME not in record else None
    if model is None:
        return
    folder = write_model(model)
    write_weights(folder, read_config(model), "cuda" if has_gpu() else "cpu")
    variants = [*VARIANTS, parse_variant(OFF)]
    with serve(folder, variants, list_flags(), deadline=serving.START_LIMIT) as (*paged, whole):
        if SAME not in record:
            record.add(SAME, **compare(paged[0], whole, read_config(model)["vocab_size"]))
        check_caches(paged)
        measure_rounds(record, model, points, paged)


def list_flags() -> list[str]:
    """Return the flags of all servers: those of dummy servers, with weights."""
    return [*serving.runner_args(MODEL), *SERVER_ARGS[SERVER_ARGS.index("dummy") + 1 :]]


def compare(paged: Server, whole: Server, vocabulary: int) -> dict[str, Any]:
    """Return how far the same prompts' log-probabilities differ, and the share of equal greedy tokens."""
    prompts = [[(97 * place + 7919 * row) % vocabulary for place in range(INPUT_TOKENS)] for row in range(PROMPTS)]
    request = {"return_logprob": True, "logprob_start_len": 0}
    answers = [server.generate(prompts, request, max_new_tokens=16, ignore_eos=True) for server in (paged, whole)]
    apart, same = [], []
    for one, other in zip(*answers, strict=True):
        pairs = zip(*(answer["meta_info"]["input_token_logprobs"][1:] for answer in (one, other)), strict=True)
        apart += [abs(mine[0] - theirs[0]) for mine, theirs in pairs]
        same += [mine == theirs for mine, theirs in zip(one["output_ids"], other["output_ids"], strict=True)]
    return {"farthest": max(apart), "mean": sum(apart) / len(apart), "tokens_same": sum(same) / len(same)}


def rows(points: Mapping[str, Any]) -> Iterator[Row]:
    """Yield whether paging computes the same, and the policy's gain at each concurrency."""
    yield from memory.rows(points, "paged")
    if SAME in points:
        same = points[SAME]
        text = f"{same['farthest']:.3f} nats, {same['tokens_same']:.0%} of greedy tokens the same"
        is_near = same["farthest"] <= FARTHEST
        yield Row("farthest of a prompt's tokens, paged", text, f"at most {FARTHEST}", is_near)
    for concurrency in sorted(CONCURRENCIES):
        if _key(concurrency) in points:
            gain = Gain.read(points[_key(concurrency)])
            last = gain.comparison.series[1].evidence[-1]  # page-ins a layer and step
            page_ins = f"page-ins {format_number(last.page_ins_before, 1)} -> {format_number(last.page_ins, 1)}"
            what = f"{MODEL}, {SLOTS} slots, {POLICY}, concurrency {concurrency}, {page_ins}"
            yield gain.row(what)


def _key(concurrency: int) -> str:
    return f"concurrency={concurrency}"
