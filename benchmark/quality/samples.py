"""Sample answers under a policy: `python -m benchmark.quality.samples xshare xshare:fast`.

The model answers each arithmetic problem several times at a temperature. All answers to a problem are in one batch, as
in the rollouts of reinforcement learning. A policy that does not change greedy answers can still lose right answers
among several samples (arXiv 2602.02443).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from benchmark.common.command import Parser, policy, run_main
from benchmark.common.interval import find_quantile
from benchmark.common.paths import BUILD, TRAINED
from benchmark.common.table import Table
from benchmark.common.variant import BASELINE, PLAN_SPELLING, parse_plan
from benchmark.quality.defaults import describe_router, name_model
from benchmark.quality.model import Layout, load_model, prefill, router_of
from benchmark.quality.served import read_problems
from sglang_xshare import SelectionPlan

POLICIES = ("xshare:careful", "xshare", "xshare:fast", "xshare:k0=1,add=8", "oea:k0=3", "pruned:k0=3")
LONGEST = 5
"""The maximum length of an answer in tokens, including the end of the line."""
FIGURES = {"pass_one": "pass@1", "pass_all": "pass@{samples}", "distinct": "distinct answers"}
NOTE = """\
{problems} problems, {samples} answers each at temperature T, in steps of {batch} rows. pass@1: share of answers that
are right; pass@{samples}: share of problems with at least one right answer; distinct: different answers to a problem,
of {samples}. The model's own routing reads the solved problem before each; question and answer are decoded under the
policy. ±: half the 95 % t-interval over batches, because selection couples the rows of a batch; in brackets the
difference from {baseline}, on the same batches and random numbers."""


@dataclass(frozen=True)
class Problems:
    """Problems that all have the same number of tokens.

    Before each question, the model reads a solved problem. `solved` and `questions` are [problems, tokens] int64.
    """

    solved: torch.Tensor
    questions: torch.Tensor
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """The results of a policy.

    `figures` contains one tensor [batches] float64 for each name in `FIGURES`. `active` is the mean number of active
    experts per layer and step.
    """

    figures: Mapping[str, torch.Tensor]
    active: float


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the table."""
    parser = Parser("benchmark.quality.samples", __doc__)
    parser.add_policies(policy, POLICIES, f"{PLAN_SPELLING}; {BASELINE} is always the baseline")
    parser.add_checkpoint(TRAINED)
    parser.add_count("problems", 512, "arithmetic problems")
    parser.add_count("samples", 8, "answers to each")
    parser.add_count("batch", 16, "rows of a step; a multiple of the samples")
    parser.add_argument("--temperature", type=float, default=1.0, help="temperature of the samples (default: 1)")
    parser.add_record(BUILD / "quality" / "samples")
    args = parser.parse_args(argv)
    if args.batch % args.samples:
        raise ValueError(f"--batch must be a multiple of --samples {args.samples} (got {args.batch})")
    if args.temperature <= 0:
        raise ValueError(f"--temperature must be above 0 (got {args.temperature:g})")
    record = parser.open_record("samples", args, argv)
    model, layout = load_model(args.model), Layout(args.batch)
    plans = {text: parse_plan(text, args.batch) for text in dict.fromkeys([BASELINE, *args.policies])}
    router, experts = router_of(model)
    for plan in plans.values():
        plan.check(router, experts)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    problems = read_problems(args.texts or args.model / "heldout", args.problems)
    groups = list(group_problems(tokenizer, problems, args.batch // args.samples))
    counted = sum(len(group.answers) for group in groups)
    asked = {name: getattr(args, name) for name in ("batch", "samples", "temperature")}
    start = describe_router(router, experts) | {"problems": counted} | asked
    run = partial(sample, model, tokenizer, groups, layout=layout, samples=args.samples, temperature=args.temperature)
    missing = [text for text in plans if text not in record]
    if missing:
        vanilla = run(plans[BASELINE])
    for text in missing:
        found = vanilla if text == BASELINE else run(plans[text])
        figures = compare(found, vanilla)
        print(f"{text}: {found.active:.1f} experts, pass@1 {figures['pass_one']['value']:.4f}", flush=True)
        record.add(text, **start, active_experts=found.active, **figures)
    tabulate_samples(record.points).show(record.path)


def group_problems(tokenizer: Tokenizer, problems: Sequence[tuple[str, str]], multiple: int) -> Iterator[Problems]:
    """Group the problems by their numbers of tokens.

    The size of each group is a multiple of `multiple`. Leftover problems are dropped. Raises ValueError if no group
    remains.
    """
    kinds: dict[tuple[int, int], list[tuple[list[int], list[int], str]]] = {}
    for text, answer in dict.fromkeys(problems):
        solved, question = text.split("\n")
        tokens = [tokenizer.encode(one, add_special_tokens=False).ids for one in (f"{solved}\n", question)]
        kinds.setdefault((len(tokens[0]), len(tokens[1])), []).append((tokens[0], tokens[1], answer))
    whole = [kind[: len(kind) // multiple * multiple] for kind in kinds.values() if len(kind) >= multiple]
    if not whole:
        raise ValueError(f"problems must include {multiple} of equally many tokens (got {len(problems)} in all)")
    for kind in whole:
        solutions, questions, answers = zip(*kind, strict=True)
        yield Problems(torch.tensor(solutions), torch.tensor(questions), answers)


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    groups: Sequence[Problems],
    plan: SelectionPlan,
    layout: Layout,
    samples: int,
    temperature: float,
) -> Outcome:
    """Sample answers under a policy and return the results. Every policy uses the same random numbers."""
    draws = torch.Generator().manual_seed(0)
    figures: dict[str, list[torch.Tensor]] = {name: [] for name in FIGURES}
    active: list[torch.Tensor] = []

    def draw(logits: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(logits).exponential_(generator=draws)  # the Gumbel-max trick
        return (logits / temperature - noise.log()).argmax(1)

    for group in groups:
        solved, questions = (one.repeat_interleave(samples, 0) for one in (group.solved, group.questions))
        tokens, found = prefill(model, solved).sample(questions, plan, layout, draw, LONGEST)
        texts = tokenizer.decode_batch(tokens.tolist(), skip_special_tokens=False)
        given = [text.partition("\n")[0] + "\n" for text in texts]
        answers = [given[start : start + samples] for start in range(0, len(given), samples)]
        right = torch.tensor(
            [[one == wanted for one in some] for some, wanted in zip(answers, group.answers, strict=True)]
        )
        per_batch = layout.batch // samples
        for name, values in (
            ("pass_one", right.double().mean(1)),
            ("pass_all", right.any(1).double()),
            ("distinct", torch.tensor([len(set(some)) / samples for some in answers], dtype=torch.float64)),
        ):
            figures[name].append(values.view(-1, per_batch).mean(1))
        active += [step for one in found for step in one.active]
    return Outcome({name: torch.cat(values) for name, values in figures.items()}, torch.cat(active).mean().item())


def compare(found: Outcome, vanilla: Outcome) -> dict[str, Any]:
    """Return the mean of each result and its difference from vanilla. Both have standard errors."""
    figures = {}
    for name, values in found.figures.items():
        own = vanilla.figures[name]
        figures[name] = {
            "value": values.mean().item(),
            "error": _find_error(values),
            "delta": (values - own).mean().item(),
            "delta_error": _find_error(values - own),
        }
    return figures


def tabulate_samples(*records: Mapping[str, Any]) -> Table:
    """Return a table with one row for each policy in each record."""
    first = next(iter(records[0].values()))
    headings = ["model", "T", "policy", "experts", *(heading.format(**first) for heading in FIGURES.values())]
    rows = [
        [
            name_model(point),
            f"{point['temperature']:g}",
            text,
            f"{point['active_experts']:.1f}",
            *(_spell(point, name, text == BASELINE) for name in FIGURES),
        ]
        for points in records
        for text, point in points.items()
    ]
    return Table("Sampled answers", headings, rows, NOTE.format(baseline=BASELINE, **first))


def _find_error(values: torch.Tensor) -> float:
    """Return the standard error of the mean of `values` [batches]."""
    return values.std().item() / len(values) ** 0.5


def _spell(point: Mapping[str, Any], name: str, is_baseline: bool) -> str:
    figure, batches = point[name], point["problems"] * point["samples"] // point["batch"]
    value, delta = (f"± {find_quantile(batches - 1) * figure[error]:.3f}" for error in ("error", "delta_error"))
    text = f"{figure['value']:.3f} {value}"
    return text if is_baseline else f"{text} ({figure['delta']:+.3f} {delta})"


if __name__ == "__main__":
    run_main("samples", main)
