"""A check for experts that SGLang cannot build.

The weights of such experts are quantized in fp8 or int8 blocks. SGLang cannot divide an expert if the columns of a rank
would end within a block.
"""

from collections.abc import Iterator
from typing import Any

from ..compatibility.formats import CHECKED, count_block, find_quantization, find_widths, read_format, slice_columns
from ..upstream.configuration import NUM_EXPERTS, find_value
from ..upstream.server import is_switched_on, routes_own_rows, spell

SHARED = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
SHARED_COUNT = ("n_shared_experts", "num_shared_experts")


def explain_cut(model: Any, config: Any) -> str | None:
    """Return the reason why SGLang cannot build a model's experts. Return None if SGLang can build them.

    The reason also names flags that help. `model` is SGLang's `ModelConfig`, and `config` contains the resolved
    arguments.
    """
    kind = read_format(model, spell(config.quantization))
    # SGLang pads such columns on a CPU (configs/update_config.py) and with aiter (padding_size in fp8.py).
    if kind not in CHECKED or config.device == "cpu" or is_switched_on("SGLANG_USE_AITER"):
        return None
    block = count_block(find_quantization(model))
    text, ranks, ep_size = model.hf_text_config, config.tp_size, config.ep_size
    shared = 1 if routes_own_rows(config) else ranks  # with all-to-all each rank holds the whole shared expert
    cut = next(_list_cut(text, ranks // ep_size // getattr(config, "moe_dp_size", 1), shared, block, ep_size), None)
    if cut is None:
        return None
    width, count, what = cut
    held = f"{width // count} of the {width} columns of {what}, which is no multiple of the blocks of {block}"
    allowed = []
    experts = find_value(text, NUM_EXPERTS) + config.ep_num_redundant_experts
    if experts % ranks == 0 and not any(_list_cut(text, 1, shared, block, ranks)):
        allowed.append(f"--ep-size {ranks}")
    fewer = (count for count in range(ranks - 1, 0, -1) if ranks % count == 0)
    allowed += [f"--tp {count}" for count in fewer if not any(_list_cut(text, count, count, block, 1))][:1]
    return (
        f"--tp-size {ranks} with --ep-size {ep_size}: a rank would hold {held} that its {kind} weights are quantized "
        f"by; use {' or '.join(allowed) or 'another checkpoint'}"
    )


def _list_cut(text: Any, experts: int, shared: int, block: int, ep_size: int) -> Iterator[tuple[int, int, str]]:
    """Yield the experts that the ranks cannot divide, because the columns of a rank would end within a block.

    Each result contains the number of columns, the number of ranks that divide them, and the text "an expert" or "the
    shared expert". `experts` is the number of ranks that divide an expert. `shared` is the number of ranks that divide
    the shared expert.
    """
    widths = [(width, experts, "an expert") for width in find_widths(text)]
    own = find_value(text, SHARED)
    if not own and ep_size > 1:  # without expert parallelism SGLang fuses the shared expert into the experts
        own = find_value(text, SHARED_COUNT) * (find_widths(text) or [0])[0]
    if own:
        widths.append((own, shared, "the shared expert"))
    for width, ranks, what in widths:
        if slice_columns(width, ranks, block) is None:
            yield width, ranks, what
