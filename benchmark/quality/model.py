"""A transformers MoE model that routes with `select()` and computes many decode steps in one forward.

The OEA paper describes this method in section 4.1. Decode step t processes token t of every sequence in the batch.
Selection depends only on the tokens of the step. So with teacher forcing, one forward can compute all steps, and every
step selects the same experts as in real decoding. Prompts use the model's own routing, as in the server.
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
"""The function that selects experts in a layer: `select`, or a wrapper that adds information about the batch."""


@dataclass(frozen=True)
class Layout:
    """The shape of decode steps. A step contains `batch` sequences and `tokens_per_request` tokens of each sequence."""

    batch: int
    tokens_per_request: int = 1

    @property
    def rows(self) -> int:
        """Return the number of router rows in a step."""
        return self.batch * self.tokens_per_request

    def __str__(self) -> str:
        tokens = "1 token" if self.tokens_per_request == 1 else f"{self.tokens_per_request} tokens"
        return f"{self.batch} {'request' if self.batch == 1 else 'requests'} x {tokens}"

    def split(self, rows: torch.Tensor) -> torch.Tensor:
        """Rearrange [sequences, tokens, x] into [steps, rows of a step, x].

        The rows of a step are grouped by request. Raises ValueError as `check` does.
        """
        self.check(*rows.shape[:2])
        requests = rows.unflatten(1, (-1, self.tokens_per_request)).unflatten(0, (-1, self.batch))
        return requests.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def check(self, sequences: int, tokens: int) -> None:
        """Raise ValueError if the sequences or their tokens cannot be divided into steps of this layout."""
        for name, count, whole in (
            ("batch", self.batch, sequences),
            ("tokens-per-request", self.tokens_per_request, tokens),
        ):
            if whole % count:
                raise ValueError(f"--{name} must divide {whole} (got {count})")

    def count(self, sequences: int, tokens: int) -> torch.Tensor:
        """Return a bool tensor [sequences, tokens] that marks the tokens whose loss counts. Here all tokens count."""
        return torch.ones(sequences, tokens, dtype=torch.bool)

    def join(self, steps: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Rearrange the rows of steps into [sequences, tokens, x]. This is the inverse of `split`.

        `own` [sequences, tokens, x] is the model's own choice. Only its shape is used here.
        """
        requests = steps.unflatten(1, (self.batch, -1)).unflatten(0, (-1, own.shape[1] // self.tokens_per_request))
        return requests.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def describe(self, sequences: int, tokens: int) -> Iterator[Batch]:
        """Yield a `Batch` for each step. The order is that of `split`."""
        return repeat(Batch(tokens_per_request=self.tokens_per_request))


@dataclass(frozen=True)
class Routing:
    """The results of selection. Every list contains one tensor for each MoE layer.

    - `active` [steps] float32: the number of active experts under the policy.
    - `vanilla_active` [steps] float32: the number of active experts under the model's own routing.
    - `kept_mass` [steps, rows of a step] float32: the share of the gating mass that the policy keeps.
    """

    active: list[torch.Tensor] = field(default_factory=list)
    vanilla_active: list[torch.Tensor] = field(default_factory=list)
    kept_mass: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Prefilled:
    """A model after the prefill of its prompts with its own routing. `cache` is the KV cache of the prompts."""

    model: PreTrainedModel
    cache: DynamicCache

    def decode(
        self, tokens: torch.Tensor, plan: Plans, layout: Layout, selects: Sequence[Select] | None = None
    ) -> tuple[torch.Tensor, Routing]:
        """Decode `tokens` [sequences, tokens] under a policy with teacher forcing.

        `plan` is one plan for all MoE layers, or one plan for each. `selects` contains one function for each layer that
        replaces `select`. Return the logits of the next tokens, [sequences, tokens, vocabulary] float32, and the
        routing. Raises ValueError if the plan does not fit the model or the tokens do not fit the layout.
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
        """Decode `forced` tokens [sequences, tokens] under `plan`, and then sample `count` more tokens.

        `draw` receives logits [sequences, vocabulary] float32 and chooses the next token of each sequence. `layout`
        must have one token per request. Return the sampled tokens [sequences, count] and the routing of each forward.
        Raises ValueError as `decode` does.
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
    """Load a checkpoint in float32. Raises ValueError if it does not exist or its routing cannot be replaced."""
    if not (path / "config.json").is_file():
        raise ValueError(f"model must be the folder of a checkpoint, with a config.json (got {path})")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for module in model.modules():
        if hasattr(module, "num_group") and not hasattr(module, "num_experts"):
            module.num_experts = model.config.n_routed_experts  # DeepSeek-V2 reads it, but transformers never sets it
    if not find_gates(model):
        raise ValueError(f"model {path} must be a mixture of experts (got {type(model).__name__}, without a router)")
    try:
        find_routers(model)
    except ValueError as error:
        raise ValueError(f"model {path}: {error}") from None
    return model


def router_of(model: PreTrainedModel) -> tuple[Router, int]:
    """Return the router of the first MoE layer and its number of experts. Other layers differ only in their biases."""
    return find_routers(model)[0], find_gates(model)[0].count_experts()


@torch.inference_mode()
def prefill(model: PreTrainedModel, prompt: torch.Tensor) -> Prefilled:
    """Prefill the prompts [sequences, tokens] with the model's own routing."""
    return Prefilled(model, model(prompt, use_cache=True, logits_to_keep=1).past_key_values)


@torch.inference_mode()
def router_logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the router logits of all MoE layers, as [layers, sequences, tokens, experts]."""
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
    """Replace the model's routing within this context. Every forward must have `tokens` tokens per sequence."""
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
        # Empty slots (id -1) become expert 0 with weight 0. This takes time, but does not change the output.
        ids = torch.stack([step.topk_ids for step in steps]).clamp(min=0).long()
        weights = torch.stack([step.topk_weights for step in steps])
        own = [one.unflatten(0, (-1, tokens)) for one in choice]
        return layout.join(ids, own[0]).flatten(0, 1), layout.join(weights, own[1]).flatten(0, 1)

    return choose
