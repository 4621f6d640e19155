"""The training loop of all checkpoints: Muon and AdamW, one schedule, a state on disk to resume from."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from training.muon import Muon

CONTEXT, SEQUENCES = 256, 15
WARM_UP, DECAY = 50, 0.35  # steps; share of all steps
SAVE_EVERY = 200
REPORT_EVERY = 20
NOT_FOR_MUON = (
    "embed_tokens",
    "lm_head",
    ".gate.",
)  # tables and the router are no matrix products to keep well conditioned


def optimizers(model: nn.Module) -> list[Optimizer]:
    """Return Muon for the trained matrices, and AdamW for tables, the router and the norms."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim > 1 and not any(part in name for part in NOT_FOR_MUON)
            (matrices if is_matrix else others).append(parameter)
    return [Muon(matrices, lr=0.03, weight_decay=0.01), AdamW(others, lr=6e-3, betas=(0.9, 0.95), weight_decay=0.01)]


def schedule(step: int, steps: int) -> float:
    """Return the learning rate's factor: warm-up, constant, linear decay to 0. Weights before the decay are usable."""
    return min((step + 1) / WARM_UP, 1.0, (steps - step) / (DECAY * steps))


def batch(streams: list[Tensor], draw: torch.Generator) -> Tensor:
    """Return ids [SEQUENCES, CONTEXT]: equally many sequences of each stream, from random places."""
    rows = []
    for stream in streams * (SEQUENCES // len(streams)):
        start = int(torch.randint(len(stream) - CONTEXT, (), generator=draw))
        rows.append(stream[start : start + CONTEXT])
    return torch.stack(rows)


class Training:
    """A model, the loss it is trained on, its optimizers, and the state of all on disk."""

    def __init__(
        self, model: nn.Module, loss: Callable[[torch.Generator], Tensor], steps: int, state_file: Path, seed: int = 0
    ) -> None:
        """Resume from `state_file` if there is one.

        `loss` draws a batch with the given generator, which `seed` starts, and returns a scalar.
        """
        self.model, self.loss, self.steps, self.state_file = model, loss, steps, state_file
        self.optimizers = optimizers(model)
        self.schedulers = [LambdaLR(optimizer, lambda step: schedule(step, steps)) for optimizer in self.optimizers]
        self.draw = torch.Generator().manual_seed(seed + 1)
        self.step = 0
        if state_file.exists():
            self._resume(torch.load(state_file))

    def run(self) -> Iterator[int]:
        """Train to `steps`; yield the step after each save."""
        started, first = time.monotonic(), self.step
        while self.step < self.steps:
            loss = self._update()
            self.step += 1
            if self.step % REPORT_EVERY == 0:
                seconds = (time.monotonic() - started) / (self.step - first)
                print(f"step {self.step}/{self.steps}  loss {loss:.3f}  {seconds:.2f} s a step", flush=True)
            if self.step % SAVE_EVERY == 0 or self.step == self.steps:
                self._save()
                yield self.step

    def _update(self) -> float:
        loss = self.loss(self.draw)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return loss.item()

    def _save(self) -> None:
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "draw": self.draw.get_state(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        self.state_file.parent.mkdir(parents=True, exist_ok=True)
        shadow = self.state_file.with_suffix(".new")
        torch.save(state, shadow)
        os.replace(shadow, self.state_file)

    def _resume(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.draw.set_state(state["draw"])
        for optimizer, scheduler, saved in zip(self.optimizers, self.schedulers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
            scheduler.last_epoch = self.step
