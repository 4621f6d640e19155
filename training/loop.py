"""The training loop of all checkpoints. It uses Muon and AdamW, and stores its state on disk."""

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
WARM_UP, DECAY = 50, 0.35  # number of warm-up steps; share of all steps in which the learning rate decays
SAVE_EVERY = 200
REPORT_EVERY = 20
NOT_FOR_MUON = (
    "embed_tokens",
    "lm_head",
    ".gate.",
)  # these parameters are trained with AdamW, because they are not ordinary matrices of a matrix product


def optimizers(model: nn.Module) -> list[Optimizer]:
    """Return two optimizers: Muon for most matrices, and AdamW for embeddings, output matrix, routers and norms."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim > 1 and not any(part in name for part in NOT_FOR_MUON)
            (matrices if is_matrix else others).append(parameter)
    return [Muon(matrices, lr=0.03, weight_decay=0.01), AdamW(others, lr=6e-3, betas=(0.9, 0.95), weight_decay=0.01)]


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate in a step: first a warm-up, then constant, then a linear decay to 0."""
    return min((step + 1) / WARM_UP, 1.0, (steps - step) / (DECAY * steps))


def batch(streams: list[Tensor], draw: torch.Generator) -> Tensor:
    """Draw sequences from random positions, the same number from each stream, and return [SEQUENCES, CONTEXT] ids."""
    rows = []
    for stream in streams * (SEQUENCES // len(streams)):
        start = int(torch.randint(len(stream) - CONTEXT, (), generator=draw))
        rows.append(stream[start : start + CONTEXT])
    return torch.stack(rows)


class Training:
    """The training of a model. The state of the model and of the optimizers is stored on disk."""

    def __init__(
        self, model: nn.Module, loss: Callable[[torch.Generator], Tensor], steps: int, state_file: Path, seed: int = 0
    ) -> None:
        """Prepare the training, and resume from `state_file` if the file exists.

        `loss` is a function that draws a batch with the given random generator and returns the loss. `seed` is the seed
        of the generator.
        """
        self.model, self.loss, self.steps, self.state_file = model, loss, steps, state_file
        self.optimizers = optimizers(model)
        self.schedulers = [LambdaLR(optimizer, lambda step: schedule(step, steps)) for optimizer in self.optimizers]
        self.draw = torch.Generator().manual_seed(seed + 1)
        self.step = 0
        if state_file.exists():
            self._resume(torch.load(state_file))

    def run(self) -> Iterator[int]:
        """Train until the number of steps is reached. Yield the current step after each save."""
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
