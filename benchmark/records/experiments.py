"""What is measured, in which order, and where its record lies."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Experiment:
    """One `python -m <module>`, which leaves `<name>.json` and its plots in a folder below the results. It takes so
    many minutes at full size, which is its defaults, on two quiet cores; `small` are the arguments of the smallest size
    that goes through.
    """

    name: str
    module: str
    folder: str
    minutes: int
    small: tuple[str, ...]

    def path(self, results: Path) -> Path:
        """Of the record."""
        return results / self.folder / f"{self.name}.json"


POLICY = "xshare:k0=1,add=24"
SERVED = ("--rounds", "1", "--requests", "4", "--concurrency", "4", "--output-tokens", "8")
TEXT = ("--per-domain", "4", "--batch", "4", "--prompt", "16")
LOSS = ("--sums", "4", "--per-domain", "4", "--loss-tokens", "8")
EXPERIMENTS = {
    one.name: one
    for one in (
        Experiment("serving", "benchmark.serving", "serving", 7, ("vanilla", POLICY, *SERVED)),
        Experiment("quality", "benchmark.quality", "quality", 7, (POLICY, *TEXT, "--steps", "8")),
        Experiment("speculation", "benchmark.speculation", "speculation", 8, ("xshare", *SERVED, *LOSS)),
        Experiment(
            "cost", "benchmark.cost", "cost", 4, (POLICY, "--rounds", "2", "--step-rounds", "1", "--step-tokens", "4")
        ),
        Experiment("demo", "benchmark.demo", "demo", 5, (*SERVED, *LOSS)),
        Experiment("findings", "benchmark.quality.findings", "quality/findings", 6, ("overlap", *TEXT)),
    )
}
"""In the order of a whole run."""
