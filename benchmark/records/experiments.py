"""What is measured, in which order, and where its record lies."""

from dataclasses import dataclass
from pathlib import Path

from benchmark.common.paths import BUILD


@dataclass(frozen=True)
class Experiment:
    """One `python -m <module>`, which leaves `<record>.json`, as it is named unless told otherwise, in a folder below
    the results, and beside it those of its `plots` that a page shows. It takes so many minutes at full size, with
    `arguments`, on two quiet cores; `small` are those of the smallest size that goes through. At full size it takes a
    model that `python -m training.train_moe --model <trained>` makes, where it takes one.
    """

    name: str
    module: str
    folder: str
    minutes: int
    small: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    record: str = ""
    trained: str = ""
    plots: tuple[str, ...] = ()

    @property
    def model(self) -> Path | None:
        """The folder of the trained model that it takes."""
        return BUILD / "models" / self.trained if self.trained else None

    @property
    def kind(self) -> str:
        """The name in its record, and of its file."""
        return self.record or self.name

    def path(self, results: Path) -> Path:
        """Of the record."""
        return results / self.folder / f"{self.kind}.json"


POLICY = "xshare:k0=1,add=24"
PREFERRED = "xshare:k0=1,add=4,utility=squared,own_share=0.75"
OBSERVED = ("vanilla", "observe", "--model", "checkpoints/qwen3-moe-tiny")
SERVED = ("--rounds", "1", "--requests", "4", "--concurrency", "4", "--output-tokens", "8")
TEXT = ("--per-domain", "4", "--batch", "4", "--prompt", "16")
LOSS = ("--sums", "4", "--per-domain", "4", "--loss-tokens", "8")
SAMPLES = ("--samples", "8", "--prompt", "8", "--tokens", "8")
FRONT = (POLICY, *TEXT[:2], "--batches", "4", *TEXT[4:], "--steps", "8")
DISPATCH = ("--per-domain", "8", "--requests", "100", "--seeds", "1", "--calibration", "384", "--replicas", "2")
SERVED_DISPATCH = (
    "--replicas",
    "2",
    "--per-replica",
    "4",
    "--requests",
    "24",
    "--life",
    "12",
    *DISPATCH[:2],
    *DISPATCH[6:8],
)


def _on_trained(name: str, model: str, minutes: int, small: tuple[str, ...]) -> Experiment:
    """The experiment of the shipped checkpoint on another model."""
    record = name.replace("-", "_")
    arguments = ("--model", f"build/models/{model}")
    return Experiment(
        f"{name}-{model}",
        f"benchmark.quality.{record}",
        f"quality/{record}/{model}",
        minutes,
        small,
        arguments,
        record,
        model,
    )


EXPERIMENTS = {
    one.name: one
    for one in (
        Experiment(
            "serving", "benchmark.serving", "serving", 10, ("off", POLICY, "--drafted", "off", "xshare", *SERVED, *LOSS)
        ),
        Experiment("quality", "benchmark.quality", "quality", 4, (POLICY, *TEXT, "--steps", "8")),
        Experiment(
            "front",
            "benchmark.quality.front",
            "quality/front",
            6,
            FRONT,
        ),
        Experiment(
            "paged", "benchmark.paged", "paged", 6, (PREFERRED, *TEXT[:2], *TEXT[4:], "--steps", "8", "--rows", "4")
        ),
        Experiment("paged-live", "benchmark.paged.live", "paged", 9, (PREFERRED, *SERVED, *LOSS), record="live"),
        Experiment(
            "cost", "benchmark.cost", "cost", 3, (POLICY, "--rounds", "2", "--step-rounds", "1", "--step-tokens", "4")
        ),
        Experiment(
            "exact",
            "benchmark.serving.exact",
            "serving",
            9,
            (POLICY, "--exact", "0", "2", "--rounds", "1", "--output-tokens", "8", "--loss-batches", "1"),
        ),
        Experiment("observe", "benchmark.serving", "observe", 2, (*OBSERVED, *SERVED, *LOSS), OBSERVED, "serving"),
        Experiment(
            "balance", "benchmark.balance", "balance", 1, ("vanilla", "xshare:k0=1,target_per_rank=5", "--batches", "4")
        ),
        Experiment(
            "balance-live",
            "benchmark.balance.live",
            "balance",
            6,
            ("xshare:k0=1,target_per_rank=5", "--ep-size", "2", "--rounds", "1", "--batch", "4", "--steps", "4"),
            record="live",
        ),
        Experiment(
            "tuning",
            "benchmark.tuning",
            "tuning",
            5,
            ("--offline", POLICY, "--settings", POLICY, "--tolerances", "20", "--batches", "4", *SAMPLES),
            ("--offline",),
        ),
        Experiment("affinity", "benchmark.affinity", "affinity", 3, ("mixed", *DISPATCH), plots=("affinity.png",)),
        Experiment(
            "affinity-live",
            "benchmark.affinity.live",
            "affinity",
            24,
            ("expert_affinity", "--traffic", "mixed", "--policies", POLICY, *SERVED_DISPATCH),
            (
                *("round_robin", "expert_affinity", "--requests", "768", "--traffic", "mixed", "shift", "flood"),
                *("--policies", "vanilla", "xshare:k0=1,add=16"),
            ),
            record="live",
        ),
        Experiment(
            "ranks",
            "benchmark.cost.ranks",
            "cost",
            2,
            ("--experts", "8", "--active", "4", "8", "--rows", "8", "--rounds", "1", "--hidden", "16", "--width", "32"),
        ),
        Experiment(
            "expert-sharding",
            "benchmark.expert_sharding",
            "expert_sharding",
            4,
            ("--alpha", "0.6", "--experts", "8", "--batch", "4", "--sequence", "6", "--hidden", "16", "--rounds", "1"),
        ),
        Experiment(
            "neighbours",
            "benchmark.neighbours",
            "neighbours",
            2,
            (POLICY, "--prompts", "2", "--others", "3", "--prompt", "8", "--tokens", "4"),
        ),
        *(_on_trained("front", model, 6, FRONT) for model in ("grouped", "wide")),
    )
}
"""In the order of a whole run."""
