"""The training loop: orthogonal updates, and a run that resumes where it was stopped."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from training import loop
from training.loop import Training


def run(steps: list[int], state_file: Path) -> Tensor:
    """The weights after training to each of `steps` in turn, with a fresh model each time."""
    for until in steps:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))

        def loss(draw: torch.Generator, model: nn.Module = model) -> Tensor:
            return model(torch.randn(4, 6, generator=draw)).square().sub(1).square().mean()

        job = Training(model, loss, 6, state_file)
        for step in job.run():
            if step == until:
                break
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SAVE_EVERY", 2)
    whole = run([6], tmp_path / "whole.pt")
    in_parts = run([2, 4, 6], tmp_path / "parts.pt")
    torch.testing.assert_close(in_parts, whole, rtol=0, atol=0)
    assert not torch.equal(run([2], tmp_path / "short.pt"), whole)
