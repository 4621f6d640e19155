"""Find the budget that fits any model and batch: `python -m benchmark.quality.defaults --model DIR`.

Measures several kinds of budgets of `xshare`: a number of experts, a share of the model's experts, or a share of the
utility. The batch size varies, and the batches have one domain or mixed domains. If `--tokens-per-request` is above 1,
budgets for each request are measured too. Policies given as arguments replace the budgets. `--skip` skips the first
sequences of each domain, because the default budgets were chosen on them.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from benchmark.common.command import policy, run_main
from benchmark.common.paths import BUILD
from benchmark.common.table import Table
from benchmark.common.variant import parse_plan
from benchmark.quality.measure import explain_errors, format_loss
from benchmark.quality.model import Layout
from benchmark.quality.sweep import MIXED, ONE_DOMAIN, Point, make_parser, run_sweep
from sglang_xshare import Router

BATCHES = (2, 4, 8, 16, 32)
ADDS, SHARES = (24, 16, 32, 48), (0.125, 0.1875, 0.25, 0.375, 0.5)
MASSES = (0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.99)
PER_REQUEST = (4, 5)
"""The best budgets per request in the XShare paper, for speculative decoding."""
BY_ROWS = ("xshare:careful", "xshare", "xshare:fast")
"""The policies whose budget depends on the number of router rows."""
NAMED = (*BY_ROWS, "xshare:k0=1,add=24")
"""The policies that the guide compares."""
NOTE = """\
All settings have k0=1; a policy by name has, at each size, the setting of its rows. Experts: active experts as a share
of vanilla's, mean over models and steps of {batches} requests x {tokens} tokens, of one domain and of mixed ones. Loss:
nats a token above vanilla's on the same tokens: the worst of all these cases and its place, then the mean. {errors} The
worst of many losses is larger by chance than a single loss. Models: {models}."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the table."""
    parser = make_parser("benchmark.quality.defaults", __doc__, BATCHES, (1,), steps=32, prompt=32)
    parser.add_policies(policy, (), "policies in place of the budgets")
    parser.add_record(BUILD / "quality" / "defaults")
    args = parser.parse_args(argv)
    record = parser.open_record("defaults", args, argv)

    def list_points(layout: Layout, text: str, router: Router, experts: int) -> list[Point]:
        verifies = layout.tokens_per_request > 1
        settings = {name: name for name in args.policies} or dict(list_settings(experts, verifies))
        fields = {**describe_router(router, experts), "mixing": text}
        return [
            Point(f"{layout}, {text}, {name}", {name: one}, {**fields, "setting": name})
            for name, one in settings.items()
        ]

    layouts = [Layout(*both) for both in product(args.batch, args.tokens_per_request)]
    run_sweep(record, args, layouts, list_points, (ONE_DOMAIN, MIXED))
    tabulate_defaults(record.points).show(record.path)


def describe_router(router: Router, experts: int) -> dict[str, Any]:
    """Return the fields that describe the router in a point. `name_model` reads them."""
    groups = {"groups": [router.topk_group, router.num_expert_group]} if (router.num_expert_group or 1) > 1 else {}
    return {"experts": experts, "top_k": router.top_k, "scoring": router.scoring, **groups}


def list_settings(experts: int, verifies: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the name and the policy of each budget.

    `experts` is the model's number of experts. `verifies` adds the budgets for verify steps.
    """
    for add in PER_REQUEST if verifies else ():
        yield f"add_per_request={add}", f"xshare:k0=1,add_per_request={add}"
    for add in ADDS:
        yield f"add={add}", f"xshare:k0=1,add={min(add, experts)}"
    for share in SHARES:
        yield f"add={share:g} of the experts", f"xshare:k0=1,add={round(share * experts)}"
    for mass in MASSES:
        yield f"mass={mass:g}", f"xshare:k0=1,mass={mass:g}"


def find_setting(policy: str, point: Mapping[str, Any]) -> str:
    """Return the name of the budget that the policy uses in steps of the point's size."""
    plan = parse_plan(policy, point["batch"] * point.get("tokens_per_request", 1))
    return f"add={plan.add}" if plan.mass is None else f"mass={plan.mass:g}"


def tabulate_defaults(*records: Mapping[str, Any]) -> Table:
    """Return a table with one row for each budget and for each policy of `BY_ROWS`. A row covers all models."""
    by_setting: dict[str, list[Mapping[str, Any]]] = {}
    everything = [point for points in records for point in points.values()]
    for point in everything:
        by_setting.setdefault(point["setting"], []).append(point)
    for name in BY_ROWS:
        chosen = [point for point in everything if point["setting"] == find_setting(name, point)]
        if set(map(_locate, chosen)) == set(map(_locate, everything)):
            by_setting.setdefault(name, chosen)
    rows = []
    for setting, points in by_setting.items():
        worst = max(points, key=lambda point: point["loss"]["delta"])
        share = fmean(point["active_experts"] / point["vanilla_active"] for point in points)
        mean = fmean(point["loss"]["delta"] for point in points)
        place = f"{name_model(worst)}, {_name_step(worst)}, {worst['mixing']}"
        rows.append([setting, f"{share:.0%}", format_loss(worst["loss"]), place, f"{mean:+.4f}"])
    note = NOTE.format(
        batches=", ".join(map(str, dict.fromkeys(point["batch"] for point in everything))),
        tokens=", ".join(map(str, dict.fromkeys(point.get("tokens_per_request", 1) for point in everything))),
        errors=explain_errors(point["loss"] for point in everything),
        models="; ".join(dict.fromkeys(map(name_model, everything))),
    )
    return Table("Budgets for any model", ["budget", "experts", "worst loss", "where", "mean loss"], rows, note)


def _name_step(point: Mapping[str, Any]) -> str:
    """Return the requests of a step, and the tokens of each request if there are several."""
    tokens = point.get("tokens_per_request", 1)
    return f"{point['batch']} requests" + (f" x {tokens} tokens" if tokens > 1 else "")


def _locate(point: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the model, the size of a step and the mixing of a point."""
    return name_model(point), point["batch"], point.get("tokens_per_request", 1), point["mixing"]


def tabulate_named(*records: Mapping[str, Any]) -> Table:
    """Return a table with one row for each policy of `NAMED` and one column for each model.

    A cell contains the share of the experts that are still active, and the worst loss.
    """
    models = {name_model(points[0]): points for points in (list(record.values()) for record in records)}
    rows = []
    for name in NAMED:
        chosen = [
            [point for point in points if point["setting"] == find_setting(name, point)] for points in models.values()
        ]
        shares = [fmean(point["active_experts"] / point["vanilla_active"] for point in points) for points in chosen]
        losses = [max(point["loss"]["delta"] for point in points) for points in chosen]
        rows.append([name, *(f"{share:.0%}, {loss:.3f}" for share, loss in zip(shares, losses, strict=True))])
    note = "Active experts divided by those of the model's own routing, mean over batch sizes of 2 to 32 requests; "
    note += "the worst loss of these batch sizes, in nats."
    return Table("Presets, by model", ["`--expert-policy`", *models], rows, note)


def name_model(point: Mapping[str, Any]) -> str:
    """Return a short description of the model's router."""
    groups = "{} of {} groups, ".format(*point["groups"]) if "groups" in point else ""
    return f"{point['scoring']}, {groups}{point['top_k']} of {point['experts']}"


if __name__ == "__main__":
    run_main("defaults", main)
