"""An EAGLE-3 draft model (Li et al., 2025, arXiv 2503.01840), for SGLang's class `LlamaForCausalLMEagle3`."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen3MoeForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

AUX_LAYERS = (0, 1, 2)  # the draft model reads the outputs of these layers of the target


def features(target: Qwen3MoeForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Run the target on `ids` [rows, tokens].

    Return the logits [rows, tokens, vocab] and the concatenated outputs of the layers in AUX_LAYERS.
    """
    output = target(ids, output_hidden_states=True)
    return output.logits, torch.cat([output.hidden_states[layer + 1] for layer in AUX_LAYERS], -1)


class DraftAttention(nn.Module):
    """Attention of a draft over the verified prefix and its own previous draft steps."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        heads, kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.groups = heads // kv_heads
        self.q_proj = nn.Linear(2 * config.hidden_size, heads * self.size, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(heads * self.size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Compute the attention for draft step `len(past)`.

        `x` is [rows, tokens, 2 * hidden]. `past` contains the keys and values of the previous draft steps. The function
        appends the keys and values of the current step. Each position attends to step 0 of all positions up to
        its own, which are the verified prefix. It also attends to the later draft steps of its own position.
        """
        rows, tokens, _ = x.shape
        q, k, v = (
            project(x).view(rows, tokens, -1, self.size).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *rotation)
        past.append((k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)))
        (prefix_keys, prefix_values), *own = past
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        scores = [(q @ prefix_keys.mT).masked_fill(~causal, -torch.inf)]
        scores += [(q * keys).sum(-1, keepdim=True) for keys, _ in own]
        shares = (torch.cat(scores, -1) * self.size**-0.5).softmax(-1)
        mixed = shares[..., :tokens] @ prefix_values
        for step, (_, values) in enumerate(own):
            mixed = mixed + shares[..., tokens + step, None] * values
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, tokens, -1))


class DraftLayer(nn.Module):
    """A Llama layer whose attention reads the features and the embedding of the next token."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.mlp = LlamaMLP(config)

    def forward(
        self, embedded: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor], past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(both, rotation, past)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Draft(nn.Module):
    """The draft model.

    In the first draft step, it predicts a token from the target's features and the embedding of the next token. In
    later steps, it uses its own features.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(AUX_LAYERS) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, aux: Tensor, embedded: Tensor, steps: int) -> list[Tensor]:
        """Return the logits of several unrolled draft steps. EAGLE-3 calls this the training-time test.

        `aux` [rows, tokens, 3 * hidden] contains the target's features, and `embedded` [rows, tokens, hidden] contains
        the embeddings of the same ids. In step s, position i depends on the target's features of ids 0..i and on the
        ids 0..i+s+1. It predicts id i+s+2. The logits of step s are [rows, tokens - s - 1, draft_vocab].
        """
        hidden, tokens = self.fc(aux), aux.shape[1]
        past: list[tuple[Tensor, Tensor]] = []
        logits = []
        for step in range(steps):
            known = F.pad(embedded[:, step + 1 :], (0, 0, 0, step + 1))  # the last positions have no next token
            positions = torch.arange(step, tokens + step, device=aux.device)[None]
            hidden = self.midlayer(known, hidden, self.rotary(hidden, positions), past)
            logits.append(self.lm_head(self.norm(hidden))[:, : tokens - step - 1])
        return logits
