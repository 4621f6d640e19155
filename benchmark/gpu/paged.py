"""Experiment `paged`: eight layers of Qwen3-30B-A3B with half of their experts in slots, policy off and on.

SGLang refuses dummy weights there, so that random ones are written to disk first. A server with all experts in memory
tells whether paging computes the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.common.comparison import Comparison, format_number, is_measured
from benchmark.common.record import Record
from benchmark.common.rounds import serve
from benchmark.common.server import Server, has_gpu
from benchmark.common.variant import OFF, Variant, parse_variant
from benchmark.gpu import memory
from benchmark.gpu.checks import choose_parts
from benchmark.gpu.models import PAGED_SINCE, read_config, write_model
from benchmark.gpu.serving import (
    INPUT_TOKENS,
    SERVER_ARGS,
    START_LIMIT,
    Gain,
    Point,
    check_caches,
    measure_rounds,
    runner_args,
)
from benchmark.gpu.table import Row
from benchmark.gpu.weights import write_weights
from sglang_xshare.patching.tree import find_tree
from sglang_xshare.upstream.release import is_since

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
    """Whether paging computes the same, then the concurrencies that the record lacks."""
    choose_parts("paged", parts)
    if not is_since(running := find_tree().release, PAGED_SINCE):
        raise ValueError(f"experiment paged: SGLang {running} pages no experts; allowed is {PAGED_SINCE} or later")
    missing = [n for n in CONCURRENCIES if not is_measured(record, _key(n))]
    if not missing and SAME in record:
        return
    model = memory.fit_model(record, "paged", MODEL, len(VARIANTS) + 1)
    if model is None:
        return
    folder = write_model(model)
    write_weights(folder, read_config(model), "cuda" if has_gpu() else "cpu")
    with serve(folder, [*VARIANTS, parse_variant(OFF)], list_flags(), deadline=START_LIMIT) as servers:
        *paged, whole = servers
        if SAME not in record:
            record.add(SAME, **compare(paged[0], whole, read_config(model)["vocab_size"]))
        check_caches(paged)
        measure_rounds(record, model, [Point(_key(one), VARIANTS, one) for one in missing], paged)


def list_flags() -> list[str]:
    """Those of all servers: as of dummy ones, but with weights."""
    given = SERVER_ARGS[SERVER_ARGS.index("dummy") + 1 :]
    return [*runner_args(MODEL), *given]


def compare(paged: Server, whole: Server, vocabulary: int) -> dict[str, Any]:
    """How far the same prompts' log-probabilities differ, at most and in the mean; the share of equal greedy tokens."""
    prompts = [[(97 * place + 7919 * row) % vocabulary for place in range(INPUT_TOKENS)] for row in range(PROMPTS)]
    request = {"return_logprob": True, "logprob_start_len": 0}
    told = [server.generate(prompts, request, max_new_tokens=16, ignore_eos=True) for server in (paged, whole)]
    apart, same = [], []
    for one, other in zip(*told, strict=True):
        pairs = zip(*(answer["meta_info"]["input_token_logprobs"][1:] for answer in (one, other)), strict=True)
        apart += [abs(mine[0] - theirs[0]) for mine, theirs in pairs]
        same += [mine == theirs for mine, theirs in zip(one["output_ids"], other["output_ids"], strict=True)]
    return {"farthest": max(apart), "mean": sum(apart) / len(apart), "tokens_same": sum(same) / len(same)}


def rows(points: Mapping[str, Any]) -> list[Row]:
    """Whether paging computes the same, and the policy's gain at each concurrency."""
    found = memory.rows(points, "paged")
    if SAME in points:
        point = points[SAME]
        told = f"{point['farthest']:.3f} nats, {point['tokens_same']:.0%} of greedy tokens the same"
        found.append(
            Row("farthest of a prompt's tokens, paged", told, f"at most {FARTHEST}", point["farthest"] <= FARTHEST)
        )
    for concurrency in sorted(CONCURRENCIES):
        if _key(concurrency) in points:
            point = points[_key(concurrency)]
            page_ins = _describe_page_ins(Comparison.read(point))
            found.append(
                Gain.read(point).row(f"{MODEL}, {SLOTS} slots, {POLICY}, concurrency {concurrency}, {page_ins}")
            )
    return found


def _describe_page_ins(comparison: Comparison) -> str:
    """A layer and step, in the last round: what the model itself would have paged in, and what the policy did."""
    last = comparison.series[1].evidence[-1]
    return f"page-ins {format_number(last.page_ins_before, 1)} -> {format_number(last.page_ins, 1)}"


def _key(concurrency: int) -> str:
    return f"concurrency={concurrency}"
