"""Models with random weights, whose speed is that of real ones of their shape."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafthead.core.target.target import Target
from drafthead.heads.base import HEADS, DraftHead

# Vocabulary, hidden and inner size, layers, heads, heads of keys, tied embeddings. `SmolLM2` is the
# shape of SmolLM2-135M, `1.5B` that of Qwen2.5-1.5B, `8B` that of Llama 3.
SHAPES = {
    "tiny": (512, 64, 128, 4, 4, 2, True),
    "91M": (4096, 768, 2048, 12, 12, 12, False),
    "SmolLM2": (49152, 576, 1536, 30, 9, 3, True),
    "1.5B": (151936, 1536, 8960, 28, 12, 2, True),
    "8B": (128256, 4096, 14336, 32, 32, 8, False),
}


def random_llama(shape: str, device: torch.device, positions: int = 2048) -> Target:
    """A bfloat16 Llama of one of `SHAPES` whose greedy tokens are no near ties."""
    torch.manual_seed(0)
    vocab, hidden, inner, layers, heads, key_heads, tied = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=tied,
        dtype=torch.bfloat16,
    )
    with device:
        model = LlamaForCausalLM._from_config(config)
    # The layers hardly change the embedding, and the output head is a permutation of it: greedy
    # tokens are far from ties, and passes of any size agree on them.
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.05
        layer.mlp.down_proj.weight.data *= 0.05
    if not tied:
        order = torch.randperm(config.vocab_size)
        model.lm_head.weight.data[order] = 50 * model.model.embed_tokens.weight.data
    return Target(model)


def random_head(family: str, target: Target, **options: object) -> DraftHead:
    """A draft head of a family with random weights, with `options` of its configuration."""
    torch.manual_seed(0)
    cls = HEADS[family]
    head = cls(cls.sized(cls.config_class(**options), target))
    head.prepare(torch.arange(target.vocab_size))
    head.initialize(target)
    return head.to(target.device, target.dtype).eval().requires_grad_(False)
