"""A large deployment on paper: `python -m benchmark.cost.many_devices`.

DeepSeek-V3's shape on H200, by the code of `sglang-xshare estimate`: replicas with and without expert affinity, expert
parallelism with and without `target_per_rank`, slices of every expert, one group or many, on one site or two. Nothing
is measured: logits are drawn, and time is computed.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmark.affinity.report import name_rule, point_key
from benchmark.common.command import Parser, one_line_errors, positive
from benchmark.common.paths import BUILD, RESULTS
from benchmark.common.record import read_record
from benchmark.common.table import Table
from sglang_xshare.admission.moe_model import MoeModel
from sglang_xshare.estimate.active import MOST_ROWS, Drawn, draw_loads, find_common
from sglang_xshare.estimate.deployment import Deployment, Requests, held_bytes
from sglang_xshare.estimate.latency import FAR, Link, estimate_step, gpu_machine
from sglang_xshare.estimate.weights import Weights, read_weights
from sglang_xshare.gpus import GPUS
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.policies.spelling import parse_policy

# https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
GPU, NODE = "h200", 8
COMMON = 0.19
"""Of the logits' variance, what all rows share: of DeepSeek-R1 as fitted to XShare's Table 2 at 8 rows
(`benchmark/balance/logits.py`); at 32 rows it has less.
"""
LAYERS = 12
"""Drawn for a mean."""
WAN = Link(latency=10e-3, bandwidth=1e9)
"""Between two sites: 10 ms for an exchange, 1 GB/s for each GPU. Assumed."""
NOTE = """\
Computed, nothing measured: DeepSeek-V3's shape in fp8 on H200, {context:,} cached tokens a request; logits drawn so
that rows agree as those of DeepSeek-R1 do in XShare's Table 2 at 8 rows, without the groups of experts to which its
router keeps a row. An expert's compute is left out; exchanges cost what DeepEP's did on H800, and overlap with nothing.
Rows: of a group of ranks that runs one step together. Fullest rank: active experts that its step waits for. {affinity}
Selection: {whole}, and for slices {sliced}, the lowest budget at which the drawn rows keep {keeps:.0%} of their mass;
what that costs in loss nobody has measured on this model. Two sites: {wan} between them."""
AFFINITY_NOTE = """\
Affinity: rows agree so much more that fewer experts are awake: {saves}. Unless --affinity-saves gives it, that is what
benchmark.affinity simulates for the shipped checkpoint with 16 requests a replica; it need not hold for another model,
nor for as many requests as here."""
WHOLE, SLICED = "xshare:k0=1,target_per_rank={},balance=fill", "xshare:k0=1,add={}"


@dataclass(frozen=True)
class Choice:
    """So many replicas of a deployment, with affinity between them or not, with selection or not; `far` is the link
    between the nodes of one.
    """

    name: str
    replicas: int
    deployment: Deployment
    affinity: bool = False
    selection: bool = False
    far: Link = FAR


def list_choices(gpus: int, sites: int = 1) -> list[Choice]:
    """What can be done with so many GPUs: groups of an eighth of them and one of all, or one on each site and one
    across the sites.
    """
    group = gpus // sites
    choices = []
    for ranks in sorted({max(NODE, gpus // 8), group}) if sites == 1 else [group]:
        choices += _list_groups(gpus // ranks, Deployment(ranks, NODE, all_to_all=True))
    if sites > 1:
        across = Deployment(gpus, group, all_to_all=True)
        choices.append(Choice(f"1 x EP {gpus}, across the sites", 1, across, far=WAN))
    return choices


def _list_groups(replicas: int, whole: Deployment) -> list[Choice]:
    """With and without affinity, where there are several, and selection; slices within a node."""
    choices = []
    slices = replace(whole, placement="shard", all_to_all=False)
    for name, deployment in {"EP": whole, "slices": slices}.items() if whole.ranks == NODE else [("EP", whole)]:
        for affinity in (False, True) if replicas > 1 else (False,):
            for selection in (False, True):
                extras = ", affinity" * affinity + ", selection" * selection
                text = f"{replicas} x {name} {whole.ranks}{extras}"
                choices.append(Choice(text, replicas, deployment, affinity, selection))
    return choices


def main(argv: Sequence[str] | None = None) -> None:
    """Compute into the record, print the table."""
    parser = Parser("benchmark.cost.many_devices", __doc__)
    swept = "(default: %(default)s)"
    parser.add_argument("--gpus", nargs="+", type=_gpus, default=[(32, 1), (256, 1), (256, 2)], metavar="GPUSxSITES")
    parser.add_argument("--per-gpu", nargs="+", type=positive, default=[8], help=f"requests of a GPU {swept}")
    parser.add_count("context", 1024, "cached tokens of a request")
    parser.add_argument("--common", type=_share, default=COMMON, metavar="SHARE", help=f"of logits' variance {swept}")
    parser.add_argument("--keeps", type=float, default=0.98, metavar="SHARE", help=f"mass that selection keeps {swept}")
    parser.add_argument(
        "--affinity-saves", type=_share, metavar="SHARE", help="of active experts (default: as recorded)"
    )
    parser.add_record(BUILD / "cost")
    args = parser.parse_args(argv)
    if (rows := max(gpus for gpus, _ in args.gpus) * max(args.per_gpu)) > MOST_ROWS:
        parser.error(f"--per-gpu {max(args.per_gpu)}: a step of {rows:,} rows; allowed are at most {MOST_ROWS:,}")
    counts = sorted({choice.replicas for asked in args.gpus for choice in list_choices(*asked) if choice.affinity})
    given = args.affinity_saves
    args.affinity_saves = read_savings(counts) if given is None else dict.fromkeys(counts, given)
    record = parser.open_record("many-devices", args, argv)
    weights = read_shape(DEEPSEEK_V3)
    for gpus, sites in args.gpus:
        for each in args.per_gpu:
            for choice in list_choices(gpus, sites):
                key = f"{gpus} GPUs, {sites} sites, {each} requests a GPU: {choice.name}"
                if key not in record:
                    print(key, flush=True)
                    found = compute(choice, weights, gpus * each, args)
                    asked = {"context": args.context, "keeps": args.keeps}
                    record.add(key, gpus=gpus, sites=sites, per_gpu=each, choice=asdict(choice), **asked, **found)
    tabulate_devices(record.points).show()
    print(f"Record: {record.path}")


def compute(choice: Choice, weights: Weights, requests: int, args: argparse.Namespace) -> dict[str, Any]:
    """Of a choice that serves so many requests in all: rows, what affinity saves, load, policy, kept mass, seconds of a
    step, bytes of a GPU.
    """
    rows, deployment = requests // choice.replicas, choice.deployment
    common, saves = args.common, 0.0
    if choice.affinity:
        saves = args.affinity_saves[choice.replicas]
        common = find_common(weights.model, rows, saves, common, LAYERS)
    if choice.selection:
        policy, drawn = select_keeping(weights.model, deployment, rows, common, args.keeps)
        load, kept = drawn.after, drawn.kept_mass
    else:
        policy, kept = "vanilla", 1.0
        load = _draw(SLICED.format(0), weights.model, deployment, rows, common).before
    machine = gpu_machine(GPUS[GPU].bandwidth * 1e9, far=choice.far)
    step = estimate_step(machine, weights, deployment, load, Requests(rows, args.context))
    return {
        "rows": rows,
        "saves": saves,
        "load": asdict(load),
        "policy": policy,
        "kept_mass": kept,
        "seconds": asdict(step),
        "weight_bytes": held_bytes(weights, deployment),
    }


def select_keeping(
    model: MoeModel, deployment: Deployment, rows: int, common: float, keeps: float
) -> tuple[str, Drawn]:
    """(policy, what it draws) with the lowest budget at which rows keep the share `keeps` of their mass."""
    whole = deployment.placement == "ep"
    low, high = 0, model.num_experts // (deployment.ranks if whole else 1)
    found = None
    while high - low > 1 or found is None:
        budget = (low + high) // 2 if high - low > 1 else high
        policy = (WHOLE if whole else SLICED).format(budget)
        drawn = _draw(policy, model, deployment, rows, common)
        if drawn.kept_mass is not None and drawn.kept_mass >= keeps:
            high, found = budget, (policy, drawn)
        elif budget == high:
            raise ValueError(f"--keeps {keeps:g}: all experts keep less; allowed is less than 1")
        else:
            low = budget
    return found


def _draw(policy: str, model: MoeModel, deployment: Deployment, rows: int, common: float) -> Drawn:
    schedule = build_schedule(*parse_policy(policy), speculative=False)
    assert schedule is not None
    return draw_loads(schedule, model, rows, 1, common, deployment.ranks, LAYERS)


def read_shape(config: Mapping[str, Any]) -> Weights:
    """The bytes of a decode step of a model of this configuration."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return read_weights(Path(folder))


def read_savings(counts: Sequence[int]) -> dict[int, float]:
    """The share of active experts that the recorded simulation of affinity saves among so many replicas: mixed traffic,
    the default bound. Raises ValueError for a number of replicas that is not recorded.
    """
    points = read_record(RESULTS / "affinity" / "affinity.json", "affinity")["points"]
    savings = {}
    for count in counts:
        if (point := points.get(point_key("mixed", count))) is None:
            raise ValueError(f"--gpus: affinity among {count} replicas is not recorded; allowed is --affinity-saves")
        active = {rule: found["active"] for rule, found in point["rules"].items()}
        savings[count] = round(1 - active[name_rule()] / active["round robin"], 4)
    return savings


def tabulate_devices(points: Mapping[str, Any]) -> Table:
    """A row a choice, below those that it is compared with."""
    rows = []
    for point in points.values():
        step, load = point["seconds"], point["load"]
        rows.append(
            [
                f"{point['gpus']} GPUs, {_count_sites(point['sites'])}, {point['per_gpu']} requests each",
                point["choice"]["name"],
                point["policy"].removeprefix("xshare:k0=1,"),
                str(point["rows"]),
                f"{point['weight_bytes'] / 1e9:.0f}",
                f"{load['active']:.0f}",
                f"{load['fullest']:.1f}" if point["choice"]["deployment"]["placement"] == "ep" else "-",
                f"{point['kept_mass']:.3f}",
                f"{step['step'] * 1e3:.1f}",
                f"{point['per_gpu'] / step['step']:,.0f}",
            ]
        )
    first = next(iter(points.values()))
    headings = [
        *("deployment", "choice", "policy", "rows", "GB a GPU", "active", "fullest rank", "kept mass", "step, ms"),
        "tokens/s a GPU",
    ]
    wan = f"{WAN.latency * 1e3:g} ms an exchange and {WAN.bandwidth / 1e9:g} GB/s a GPU"
    policies = {"whole": WHOLE.format("T"), "sliced": SLICED.format("A")}
    saves = {point["choice"]["replicas"]: point["saves"] for point in points.values() if point["choice"]["affinity"]}
    shares = ", ".join(f"{share:.1%} fewer among {count} replicas" for count, share in sorted(saves.items()))
    affinity = AFFINITY_NOTE.format(saves=shares) if saves else ""
    note = NOTE.format(context=first["context"], keeps=first["keeps"], **policies, affinity=affinity, wan=wan)
    return Table("A large deployment, on paper", headings, rows, note, text_columns=3)


def _count_sites(sites: int) -> str:
    return "1 site" if sites == 1 else f"{sites} sites"


def _gpus(text: str) -> tuple[int, int]:
    """GPUS or GPUSxSITES."""
    gpus, _, sites = text.partition("x")
    found = positive(gpus), positive(sites or "1")
    if found[0] % (found[1] * NODE):
        raise argparse.ArgumentTypeError(f"{text}: allowed are nodes of {NODE} GPUs, as many on each site")
    if (experts := DEEPSEEK_V3["n_routed_experts"]) % found[0]:
        raise argparse.ArgumentTypeError(f"{text}: allowed is a divisor of {experts} experts, held by a group of all")
    return found


def _share(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is a share from 0 to 1")
    return found


if __name__ == "__main__":
    with one_line_errors("cost.many_devices"):
        main()
