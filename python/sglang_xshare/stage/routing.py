"""What SGLang's routers are answered while the target model runs: by the policy, or as without one."""

from collections.abc import Sequence
from typing import Any

import torch

from ..upstream.server import is_recorded
from .evidence.counters import Counters
from .evidence.observe import Observation
from .layer import Layer


class Routing:
    """Finds the layer that a router's `TopKConfig` belongs to. `num_experts` is given where a rank may have to select
    in a layer that it has no rows for, because ranks gather theirs.
    """

    def __init__(self, layers: Sequence[Layer], counters: Counters, device: str, num_experts: int | None) -> None:
        self.is_running = False
        """Whether the target model's forward runs, in which layers have assignments."""
        self.observation: Observation | None = None
        """Under `observe`: layers select beside the model, and are routed as ever."""
        self._first, self._counters, self._device, self._num_experts = layers[0], counters, device, num_experts
        self._by_config = {id(layer.upstream): layer for layer in layers}
        self._by_own = {id(layer.config): layer for layer in layers}

    def route(self, topk_config: Any, router_logits: Any) -> Any:
        """The config to route the logits with. A config that is not the target's (a draft's) is returned as it is."""
        layer = self._find_selecting(topk_config, router_logits)
        return topk_config if layer is None else layer.config

    def prepare(self, topk_config: Any, output_format: Any, router_logits: Any) -> tuple[Any, Any]:
        """(what a runner that would rank logits itself is handed, the logits): masked ones, or in their place ids and
        weights, which are routed next. As they are for a layer that does not select.
        """
        layer = self._by_config.get(id(topk_config))
        if layer is None or not layer.routes_itself or self._find_selecting(topk_config, router_logits) is None:
            return output_format, router_logits
        return layer.prepare(output_format, router_logits)

    def finish(self, topk_config: Any, ids: Any, weights: Any, num_token_non_padded: Any = None) -> Any:
        """Return ids [n, columns] as their layer's runner takes them: see `Layer.finish`. Others are returned as is."""
        layer = self._by_own.get(id(topk_config))
        return ids if layer is None else layer.finish(ids, weights, num_token_non_padded)

    def enter_collective(self, topk_config: Any) -> None:
        """Select in a layer that this rank has no rows for: where ranks gather theirs, the others wait for it."""
        layer = self._by_config.get(id(topk_config))
        if layer is None or layer.assignment.plan is None or self._num_experts is None:
            return
        rows = 0 if layer.step.gather is not None else layer.step.rows
        logits = torch.zeros(rows, self._num_experts, device=self._device)
        if self._find_selecting(topk_config, logits) is not None:
            layer.choose(logits, logits, layer.router.top_k, layer.router.renormalize)

    def _find_selecting(self, topk_config: Any, router_logits: Any) -> Layer | None:
        """The layer of a config that selects in this step. One that is observed does so here, and is not returned."""
        layer = self._by_config.get(id(topk_config))
        if layer is None:
            return None
        if not self.is_running:
            # A graph would count again at every replay, inside a forward that is counted as what it is.
            if layer is self._first and not is_recorded():
                self._counters.count_outcome("no_context")
            return None
        if layer.assignment.plan is None:
            return None
        if self.observation is None:
            return layer
        self.observation.observe(layer, layer.collect(router_logits))
        return None
