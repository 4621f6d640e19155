"""The parts of SGLang's EAGLE worker that the depth policy reads."""

import logging
from collections.abc import Callable
from typing import Any

WORKER = "sglang.srt.speculative.eagle_worker_v2"
SWITCHES = "Switch adaptive runtime state"
"""The beginning of the log line that SGLang writes at each change of the depth."""


def forward_counter(worker: Any) -> Callable[[], int]:
    """Return a function that counts the launched forwards of the target model, including prefills."""
    runner = worker.target_worker.model_runner
    return lambda: int(runner.forward_pass_id)


def silence_switches() -> None:
    """Suppress the log line that SGLang writes at each change of the depth.

    Trials change the depth often, and the decode log also shows the depth.
    """
    logging.getLogger(WORKER).addFilter(_is_other)


def _is_other(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(SWITCHES)
