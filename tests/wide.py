"""Random bfloat16 models whose sizes our kernels for processors take."""

import torch
from architectures import ARCHITECTURES, OTHERS
from tiny import VOCAB
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

WIDTH, HEAD = 128, 32  # of hidden states and of heads: both are what kernels take
WIDE = {
    "hidden_size": WIDTH, "vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def model_of(name: str, head: int | None = None, **settings: object) -> PreTrainedModel:
    """A random bfloat16 model of an architecture, of sizes that kernels take, or of other heads."""
    torch.manual_seed(0)
    options = (ARCHITECTURES | OTHERS)[name] | WIDE | settings
    if head or "head_dim" in options:
        options["head_dim"] = head or HEAD
    config = AutoConfig.for_model(name, **options)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.1)
        elif name.endswith("bias"):
            parameter.data.normal_(std=0.5)
    model.get_input_embeddings().weight.data.normal_()
    return model.to(torch.bfloat16)
