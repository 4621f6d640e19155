"""Which drafts a verification accepts: upstream's kernels compute nothing, and the host counts with what they leave."""

from typing import Any

from fake_gpu.values import alias


def install_verification(module: Any) -> None:
    """No draft is accepted: each request has the first token of its tree."""
    verify = module.verify_tree_greedy_func

    def accept_none(*args: Any, **tensors: Any) -> Any:
        answer = verify(*args, **tensors)
        accept_index, candidates = alias(tensors["accept_index"]), tensors["candidates"]
        accept_index.fill_(-1)
        accept_index[:, 0] = _roots(candidates)
        alias(tensors["accept_token_num"]).zero_()
        return answer

    module.verify_tree_greedy_func = accept_none


def install_blocks(module: Any) -> None:
    """The same of a DFlash draft's block, for its worker's module, in slots that are not 0, a padding row's."""

    def prepare(*, prefix_lens: Any, positions_out: Any, cache_loc_out: Any, **given: Any) -> None:
        positions = alias(positions_out)
        positions.copy_(alias(prefix_lens).unsqueeze(1) + _count(positions.shape[1]))
        alias(cache_loc_out).copy_(positions + 1)
        alias(given["block_ids_out"]).zero_()

    def accept_none(*, prefix_lens: Any, **outputs: Any) -> None:
        for name, value in (("accept_lens", 0), ("commit_lens", 1), ("bonus_ids", 0), ("out_tokens", 0)):
            alias(outputs[f"{name}_out"]).fill_(value)
        alias(outputs["new_seq_lens_out"]).copy_(alias(prefix_lens) + 1)

    module._prepare_dflash_draft_block_unchecked = prepare
    module._compute_dflash_accept_bonus_triton_unchecked = accept_none


def install_windows(module: Any) -> None:
    """The same of a DSpark draft's, which a graph or the host accepts."""
    accept = module.TargetVerifyExecutor.accept_and_finalize

    def accept_none(self: Any, *, prefix_lens: Any, **given: Any) -> Any:
        found = accept(self, prefix_lens=prefix_lens, **given)
        for name, value in (("correct_len", 0), ("cap_trim_lens", 0), ("commit_lens", 1), ("bonus", 0)):
            alias(getattr(found, name)).fill_(value)
        alias(found.out_tokens).zero_()
        alias(found.new_seq_lens).copy_(alias(prefix_lens) + 1)
        return found

    module.TargetVerifyExecutor.accept_and_finalize = accept_none


def install_simulation(module: Any) -> None:
    """SGLANG_SIMULATE_ACC_LEN: upstream's own torch in place of its kernel."""
    simulate = module.generate_simulated_accept_index

    def on_host(accept_index: Any, **given: Any) -> Any:
        host = {name: alias(value) if hasattr(value, "is_cuda") else value for name, value in given.items()}
        return simulate(accept_index=alias(accept_index), **host).to(accept_index.device)

    module.generate_simulated_accept_index = on_host


def _count(number: int) -> Any:
    import torch

    return torch.arange(number)


def _roots(candidates: Any) -> Any:
    """The place of each request's first token among all."""
    import torch

    requests, drafts = candidates.shape
    return torch.arange(0, requests * drafts, drafts, dtype=torch.int32)
