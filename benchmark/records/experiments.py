"""What is measured, in which order, and where its record lies."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Experiment:
    """One `python -m <module>`, which leaves `<record>.json`, as it is named unless told otherwise, and its plots in a
    folder below the results. It takes so many minutes at full size, with `arguments`, on two quiet cores; `small` are
    those of the smallest size that goes through.
    """

    name: str
    module: str
    folder: str
    minutes: int
    small: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    record: str = ""

    @property
    def kind(self) -> str:
        """The name in its record, and of its file."""
        return self.record or self.name

    def path(self, results: Path) -> Path:
        """Of the record."""
        return results / self.folder / f"{self.kind}.json"


POLICY = "xshare:k0=1,add=24"
OBSERVED = ("vanilla", "observe", "--model", "checkpoints/qwen3-moe-tiny")
SERVED = ("--rounds", "1", "--requests", "4", "--concurrency", "4", "--output-tokens", "8")
TEXT = ("--per-domain", "4", "--batch", "4", "--prompt", "16")
LOSS = ("--sums", "4", "--per-domain", "4", "--loss-tokens", "8")
DISPATCH = ("--per-domain", "8", "--requests", "100", "--seeds", "1", "--calibration", "384", "--replicas", "2")
EXPERIMENTS = {
    one.name: one
    for one in (
        Experiment("serving", "benchmark.serving", "serving", 6, ("vanilla", POLICY, *SERVED)),
        Experiment("quality", "benchmark.quality", "quality", 4, (POLICY, *TEXT, "--steps", "8")),
        Experiment(
            "front",
            "benchmark.quality.front",
            "quality/front",
            7,
            (POLICY, *TEXT[:2], "--batches", "4", *TEXT[4:], "--steps", "8"),
        ),
        Experiment("speculation", "benchmark.speculation", "speculation", 6, ("xshare", *SERVED, *LOSS)),
        Experiment(
            "cost", "benchmark.cost", "cost", 3, (POLICY, "--rounds", "2", "--step-rounds", "1", "--step-tokens", "4")
        ),
        Experiment("observe", "benchmark.serving", "observe", 2, (*OBSERVED, *SERVED), OBSERVED, "serving"),
        Experiment("demo", "benchmark.demo", "demo", 5, (*SERVED, *LOSS)),
        Experiment(
            "balance", "benchmark.balance", "balance", 1, ("vanilla", "xshare:k0=1,target_per_rank=5", "--batches", "4")
        ),
        Experiment("affinity", "benchmark.affinity", "affinity", 3, ("mixed", *DISPATCH)),
        Experiment("studies", "benchmark.studies", "studies", 6, ("lynx", *TEXT, "--steps", "32")),
        Experiment("findings", "benchmark.quality.findings", "quality/findings", 4, ("overlap", *TEXT)),
    )
}
"""In the order of a whole run."""
