"""The model and its held-out text, decoded under policies, each of which is run once."""

from dataclasses import dataclass, field
from functools import cached_property

from transformers import PreTrainedModel

from benchmark.common.variant import BASELINE, parse_plan
from benchmark.quality.decoding import Decoding
from benchmark.quality.measure import Bench, Decoded, Loss, compare_loss
from benchmark.quality.model import Layout, router_of
from benchmark.quality.text import Sequences
from sglang_xshare import Router


@dataclass(eq=False)
class Lab:
    """`sequences` come domain after domain. A step of plain decoding holds `decoding.batch` of them, the domains mixed;
    one of verification a chain of `decoding.tokens_per_request` drafts, of one sequence.

    Raises ValueError for a model whose routers are not a softmax that renormalizes, which masks and Gram matrices take.
    """

    model: PreTrainedModel
    sequences: Sequences
    decoding: Decoding
    _runs: dict[tuple[str, Layout], Decoded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        router = self.router
        if router.scoring != "softmax" or router.correction_bias is not None or not router.renormalize:
            name = type(self.model).__name__
            raise ValueError(
                f"model {name}: allowed is one whose router is a softmax that renormalizes, as Qwen3-MoE's"
            )

    @cached_property
    def router(self) -> Router:
        return router_of(self.model)[0]

    @cached_property
    def num_experts(self) -> int:
        return router_of(self.model)[1]

    @cached_property
    def mixed(self) -> Sequences:
        """The sequences in the order in which domains take turns."""
        return self.sequences.take(self.sequences.mixing())

    @property
    def plain(self) -> Layout:
        """Of decode steps."""
        return Layout(self.decoding.batch)

    @property
    def draft(self) -> Layout:
        """Of verification steps."""
        return Layout(1, self.decoding.tokens_per_request)

    def decode(self, policy: str = BASELINE) -> Decoded:
        """Plain decoding under a policy."""
        return self._run(policy, self.plain)

    def verify(self, policy: str = BASELINE) -> Decoded:
        """Verification under a policy."""
        return self._run(policy, self.draft)

    def loss(self, policy: str) -> Loss:
        """Of plain decoding, above vanilla's."""
        return compare_loss(self.decode(policy).nats, self.decode().nats)

    def _run(self, policy: str, layout: Layout) -> Decoded:
        if (policy, layout) not in self._runs:
            plan = parse_plan(policy, speculative=layout.tokens_per_request > 1)
            bench = self._mixed_bench if layout.tokens_per_request == 1 else self._bench
            self._runs[policy, layout] = bench.run(plan, layout)
        return self._runs[policy, layout]

    @cached_property
    def _bench(self) -> Bench:
        return Bench(self.model, self.sequences, self.decoding.prompt)

    @cached_property
    def _mixed_bench(self) -> Bench:
        return Bench(self.model, self.mixed, self.decoding.prompt)
