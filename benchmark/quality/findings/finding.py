"""What a finding is: numbers, a figure, and for each claim of a paper whether they agree with it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from matplotlib.figure import Figure
from transformers import PreTrainedModel

from benchmark.common.variant import BASELINE, parse_plan
from benchmark.quality.measure import Bench, Decoded
from benchmark.quality.model import Layout, router_of
from benchmark.quality.text import Sequences
from sglang_xshare import Router


@dataclass(frozen=True)
class Verdict:
    """A paper's claim, what was measured here, and whether that agrees; None where it leaves the claim open."""

    claim: str
    measured: str
    agrees: bool | None


@dataclass(frozen=True)
class Finding:
    """One experiment of a paper, repeated in small: `name` is its figure's file name, and its own on the command line;
    `rows` are as printed, `numbers` everything measured, for the record.
    """

    name: str
    title: str
    source: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    verdicts: Sequence[Verdict]
    figure: Figure
    numbers: Any


@dataclass(eq=False)
class Study:
    """A model and its held-out text, domain after domain; `layout` says how drafts are verified."""

    model: PreTrainedModel
    sequences: Sequences
    prompt: int
    layout: Layout
    _runs: dict[tuple[str, bool], Decoded] = field(default_factory=dict)

    @cached_property
    def router(self) -> Router:
        return router_of(self.model)[0]

    @cached_property
    def num_experts(self) -> int:
        return router_of(self.model)[1]

    def verify(self, policy: str = BASELINE, mixed: bool = False) -> Decoded:
        """Verify drafts under a policy, in batches of one domain or of all; made once.

        The mixed ones hold the sequences in the order of `sequences.mixing()`.
        """
        if (policy, mixed) not in self._runs:
            plan = parse_plan(policy, speculative=True)
            self._runs[policy, mixed] = self._benches[mixed].run(plan, self.layout)
        return self._runs[policy, mixed]

    @cached_property
    def _benches(self) -> tuple[Bench, Bench]:
        mixed = self.sequences.take(self.sequences.mixing())
        return Bench(self.model, self.sequences, self.prompt), Bench(self.model, mixed, self.prompt)
