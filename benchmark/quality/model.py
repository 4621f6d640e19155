"""A transformers MoE model whose routing is `select()`, over many decode steps in one forward.

This is the method of OEA, section 4.1. A batch holds the t-th tokens of its sequences, and selection depends on nothing
else, so with teacher forcing every step routes exactly as in decoding, while all steps run at once. Prompts keep the
model's own routing, as in the server. `routing.py` finds the routers of any family.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmark.quality.routing import Choice, Choose, find_gates, find_routers
from sglang_xshare import Batch, Router, Selection, SelectionPlan, select

Plans = SelectionPlan | Sequence[SelectionPlan]
Select = Callable[[torch.Tensor, SelectionPlan, Router, Batch], Selection]
"""The selection of each step of a layer: `select`, or a wrapper that describes more of the batch."""


@dataclass(frozen=True)
class Layout:
    """The make-up of decode steps: `batch` consecutive sequences, `tokens_per_request` tokens of each."""

    batch: int
    tokens_per_request: int = 1

    @property
    def rows(self) -> int:
        """Return the router rows of a step."""
        return self.batch * self.tokens_per_request

    def __str__(self) -> str:
        tokens = "1 token" if self.tokens_per_request == 1 else f"{self.tokens_per_request} tokens"
        return f"{self.batch} {'request' if self.batch == 1 else 'requests'} x {tokens}"

    def split(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [sequences, tokens, x] as [steps, rows of a step, x], request by request. Raises as `check` does."""
        self.check(*rows.shape[:2])
        requests = rows.unflatten(1, (-1, self.tokens_per_request)).unflatten(0, (-1, self.batch))
        return requests.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def check(self, sequences: int, tokens: int) -> None:
        """Raise ValueError if steps of this layout do not divide `sequences`, or `tokens` of each."""
        for name, count, whole in (
            ("batch", self.batch, sequences),
            ("tokens-per-request", self.tokens_per_request, tokens),
        ):
            if whole % count:
                raise ValueError(f"--{name} must divide {whole} (got {count})")

    def count(self, sequences: int, tokens: int) -> torch.Tensor:
        """Return the tokens whose loss counts, [sequences, tokens] bool: all of them."""
        return torch.ones(sequences, tokens, dtype=torch.bool)

    def join(self, steps: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return the inverse of `split`; `own` [sequences, tokens, x] is the model's own choice."""
        requests = steps.unflatten(1, (self.batch, -1)).unflatten(0, (-1, own.shape[1] // self.tokens_per_request))
        return requests.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def describe(self, sequences: int, tokens: int) -> Iterator[Batch]:
        """Yield the `Batch` of each step that `split` returns."""
        return repeat(Batch(tokens_per_request=self.tokens_per_request))


@dataclass(frozen=True)
class Routing:
    """The results of selection; every list has a tensor for each MoE layer.

    `active`, `vanilla_active`: [steps] float32, active experts, by the policy and by the model's own top-k.
    `kept_mass`: [steps, rows of a step] float32.
    """

    active: list[torch.Tensor] = field(default_factory=list)
    vanilla_active: list[torch.Tensor] = field(default_factory=list)
    kept_mass: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Prefilled:
    """A model that has prefilled its prompts by its own routing; `cache` holds their keys and values."""

    model: PreTrainedModel
    cache: DynamicCache

    def decode(
        self, tokens: torch.Tensor, plan: Plans, layout: Layout, selects: Sequence[Select] | None = None
    ) -> tuple[torch.Tensor, Routing]:
        """Continue with `tokens` [sequences, tokens] under `plan`, one for all MoE layers or one for each.

        `selects` replaces `select`, layer by layer. Returns the next tokens' logits [sequences, tokens, vocabulary]
        float32, and the routing. Raises ValueError if the plan does not fit the model, or the tokens the layout.
        """
        with _routed(self.model, plan, layout, tokens.shape[1], selects) as routing:
            logits = self.model(tokens, past_key_values=copy.deepcopy(self.cache)).logits
        return logits.float(), routing

    def sample(
        self,
        forced: torch.Tensor,
        plan: Plans,
        layout: Layout,
        draw: Callable[[torch.Tensor], torch.Tensor],
        count: int,
    ) -> tuple[torch.Tensor, list[Routing]]:
        """Continue with `forced` tokens [sequences, tokens], then with `count` more, under `plan`.

        `draw` chooses each further token from logits [sequences, vocabulary] float32; steps have one token a sequence.
        Returns the chosen tokens [sequences, count], and the routing of each forward. Raises ValueError as `decode`.
        """
        cache, tokens = copy.deepcopy(self.cache), forced
        drawn, routings = [], []
        for _ in range(count):
            with _routed(self.model, plan, layout, tokens.shape[1], None) as routing:
                logits = self.model(tokens, past_key_values=cache, logits_to_keep=1).logits
            tokens = draw(logits[:, -1].float())[:, None]
            drawn.append(tokens)
            routings.append(routing)
        return torch.cat(drawn, 1), routings


def load_model(path: Path) -> PreTrainedModel:
    """Return a checkpoint in float32. Raises ValueError without one, or if its routing cannot be replaced."""
    if not (path / "config.json").is_file():
        raise ValueError(f"model must be the folder of a checkpoint, with a config.json (got {path})")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for module in model.modules():
        if hasattr(module, "num_group") and not hasattr(module, "num_experts"):
            module.num_experts = model.config.n_routed_experts  # transformers' DeepSeek-V2 reads it and never sets it
    if not find_gates(model):
        raise ValueError(f"model {path} must be a mixture of experts (got {type(model).__name__}, without a router)")
    try:
        find_routers(model)
    except ValueError as error:
        raise ValueError(f"model {path}: {error}") from None
    return model


def router_of(model: PreTrainedModel) -> tuple[Router, int]:
    """Return the router of the first MoE layer, and its number of experts; other layers differ only by biases."""
    return find_routers(model)[0], find_gates(model)[0].count_experts()


@torch.inference_mode()
def prefill(model: PreTrainedModel, prompt: torch.Tensor) -> Prefilled:
    """Prefill `prompt` [sequences, tokens]."""
    return Prefilled(model, model(prompt, use_cache=True, logits_to_keep=1).past_key_values)


@torch.inference_mode()
def router_logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return router logits [layers, sequences, tokens, experts] of the model's own routing."""
    seen: list[torch.Tensor] = []
    with ExitStack() as stack:
        for gate in find_gates(model):
            stack.callback(gate.intercept(lambda logits, choice: seen.append(logits)).remove)
        model(tokens, logits_to_keep=1)
    return torch.stack(seen).unflatten(1, tokens.shape)


@contextmanager
def _routed(
    model: PreTrainedModel, plan: Plans, layout: Layout, tokens: int, selects: Sequence[Select] | None
) -> Iterator[Routing]:
    """Route by `plan` within this context; every forward has `tokens` tokens a sequence."""
    routing = Routing()
    gates = find_gates(model)
    plans = [plan] * len(gates) if isinstance(plan, SelectionPlan) else plan
    with ExitStack() as stack:
        layers = zip(gates, find_routers(model), plans, selects or [select] * len(gates), strict=True)
        for gate, router, own, selecting in layers:
            stack.callback(gate.intercept(_choose(router, own, layout, tokens, routing, selecting)).remove)
        yield routing


def _choose(
    router: Router, plan: SelectionPlan, layout: Layout, tokens: int, routing: Routing, select: Select
) -> Choose:
    def choose(logits: torch.Tensor, choice: Choice) -> Choice:
        rows = logits.unflatten(0, (-1, tokens))
        described = zip(layout.split(rows), layout.describe(len(rows), tokens), strict=False)
        steps = [select(step, plan, router, batch) for step, batch in described]
        routing.active.append(torch.stack([step.active.sum() for step in steps]).float())
        routing.vanilla_active.append(torch.stack([step.vanilla_active.sum() for step in steps]).float())
        routing.kept_mass.append(torch.stack([step.kept_mass for step in steps]))
        # An expert of weight 0 in an empty slot costs time here, and changes nothing.
        ids = torch.stack([step.topk_ids for step in steps]).clamp(min=0).long()
        weights = torch.stack([step.topk_weights for step in steps])
        own = [one.unflatten(0, (-1, tokens)) for one in choice]
        return layout.join(ids, own[0]).flatten(0, 1), layout.join(weights, own[1]).flatten(0, 1)

    return choose
