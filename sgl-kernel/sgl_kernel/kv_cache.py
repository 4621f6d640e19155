"""Copies of keys and values between slots of the KV cache, in all layers."""

import ctypes

import torch
from torch import Tensor


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copy slot `src_loc[i]` to slot `tgt_loc[i]` in every buffer. A source is read before its slot is overwritten.

    * `data_ptrs` [buffers] uint64 are the addresses of contiguous buffers. `strides` [buffers] is the size of a slot in
      bytes.
    * `tgt_loc` and `src_loc` [moves] are existing slots.
    """
    if tgt_loc.numel() == 0:
        return
    target, source = tgt_loc.long(), src_loc.long()
    slots = int(torch.maximum(target, source).max()) + 1
    for address, slot_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * slot_bytes)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(slots, slot_bytes)
        buffer[target] = buffer[source]
