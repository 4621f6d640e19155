"""The parts of SGLang's EAGLE worker that the depth policy reads."""

import logging
from collections.abc import Callable
from typing import Any

WORKER = "sglang.srt.speculative.eagle_worker_v2"
SWITCHES = "Switch adaptive runtime state"
"""The beginning of SGLang's log line on each change of the depth."""


def forward_counter(worker: Any) -> Callable[[], int]:
    """Return the function that returns how many forwards of the target model were launched, prefills included."""
    runner = worker.target_worker.model_runner
    return lambda: int(runner.forward_pass_id)


def silence_switches() -> None:
    """Suppress SGLang's log line of each depth change: trials are frequent, and the decode log shows the depth."""
    logging.getLogger(WORKER).addFilter(_is_other)


def _is_other(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(SWITCHES)
