"""What is checked of a server, in order, once SGLang has resolved its arguments and before weights load."""

from __future__ import annotations

import logging
from typing import Any

from ..upstream import attention_dp_size, model_config, resolved
from .arguments import Arguments
from .draft import check_draft, check_draft_tokens
from .model import check_attention, check_schedule, read_model
from .modes import check_aligned, check_modes
from .refusal import refusal

logger = logging.getLogger(__name__)


def check_server(server_args: Any, arguments: Arguments) -> None:
    """Raise `ExpertPolicyError` for a mode, a model, a draft or a schedule that cannot be served together; warn of a
    plan that never drops an expert.
    """
    config = resolved(server_args)
    check_modes(config)
    if arguments.align:
        check_aligned(config)
    loaded = model_config(server_args)
    model = read_model(loaded, server_args.model_path)
    check_attention(model, config)
    check_draft(config, loaded.hf_text_config)
    check_draft_tokens(config)
    if arguments.trace is not None and config.dp_size > 1 and attention_dp_size(config) == 1:
        raise refusal(
            "--expert-policy-trace", arguments.trace, f"{config.dp_size} replicas would write it; allowed is one"
        )
    _, warnings = check_schedule(arguments.schedule, model, config)
    for warning in warnings:
        logger.warning(warning)
