"""Tiny models of many architectures, with the settings that make each of them special."""

import torch
from tiny import HIDDEN, VOCAB
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

WINDOW = 6
SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MLP = {"intermediate_size": 48}
GROUPED = {**MLP, "num_key_value_heads": 2}
HEAD = {**GROUPED, "head_dim": 8}
SLIDING = {"sliding_window": WINDOW}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2}
ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": GROUPED,
    "gpt2": {},  # learnt positions
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": HIDDEN},  # learnt positions, with an offset
    "xglm": {"d_model": HIDDEN, "ffn_dim": 48, "attention_heads": 4, "num_layers": 2},
    "gpt_neox": MLP,
    "gptj": {"rotary_dim": 4},
    "phi": MLP,
    "bloom": {},  # ALiBi
    "falcon": {"alibi": False},
    "falcon:alibi": {"alibi": True},
    "mistral": {**HEAD, **SLIDING},
    "mixtral": {**HEAD, **SLIDING, **EXPERTS, "num_local_experts": 4},
    "phi3": {**GROUPED, **SLIDING},
    "starcoder2": {**GROUPED, **SLIDING},
    "qwen2": {**GROUPED, **MIXED, "use_sliding_window": True},
    "qwen3": HEAD,
    "qwen3_moe": {**HEAD, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
    "gemma2": {**HEAD, **MIXED, "query_pre_attn_scalar": 8},  # caps the scores and the logits
    "gemma3_text": {**HEAD, **MIXED, "query_pre_attn_scalar": 8},
    "gemma4_text": {  # layers that share keys and values
        **HEAD, **SLIDING, "global_head_dim": 8, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_oss": {**HEAD, **MIXED, **EXPERTS, "num_local_experts": 4},  # attention sinks
    "llama4_text": {  # chunked attention
        **HEAD, "num_local_experts": 2, "intermediate_size_mlp": 48,
        "attn_temperature_tuning": False, "attention_chunk_size": WINDOW, "no_rope_layers": [1, 0],
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "olmo2": GROUPED,
    "cohere2": {**GROUPED, **MIXED},  # scales its logits
    "granite": {**GROUPED, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "smollm3": {**GROUPED, "no_rope_layers": [1, 0]},
    "stablelm": GROUPED,
    "glm4": HEAD,
    "nemotron": HEAD,
    "deepseek_v3": {**MLP, **LATENT},  # keys and values of different width
}  # fmt: skip

# Small enough for any architecture that has such settings; the others keep theirs.
FEW = {
    **HEAD, **EXPERTS, "num_experts": 4, "num_local_experts": 4, "moe_num_experts": 4,
    "n_routed_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
ALIKE = (  # which these settings make small
    "afmoe apertus apertus1p5_text arcee aria_text beam biogpt bitnet cohere cohere2_moe ctrl "
    "diffllama doge ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint fuyu "
    "gemma glm glm4_moe gpt-sw3 gpt_bigcode gpt_neox_japanese granite_swa "
    "granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 "
    "hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna mellum mimo_v2_flash "
    "minimax_m2 minimax_m3_vl_text ministral ministral3 moshi nanochat olmo olmo3 olmoe "
    "persimmon phimoe qwen2_moe sarvam_moe seed_oss solar_open vaultgemma"
)
LATENT_ALIKE = "axk1 deepseek_v2 glm4_moe_lite minicpm3 sarvam_mla youtu"
# The other targets that work and can be built small.
OTHERS: dict[str, dict[str, object]] = {
    **{name: FEW for name in ALIKE.split()},
    **{name: {**MLP, **LATENT} for name in LATENT_ALIKE.split()},
    "codegen": {"rotary_dim": 4},
    "cwm": {**HEAD, **MIXED, "bos_token_id": 1},
    "dbrx": {
        "d_model": HIDDEN, "n_heads": 4, "n_layers": 2,
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    },
    "dory": {  # layers in the middle run twice
        **FEW, "num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1,
        "n_recurrent_layers": 2,
    },
    "dots1": {**FEW, **LATENT},
    "gemma3n_text": {
        **HEAD, **SLIDING, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
        "vocab_size_per_layer_input": VOCAB, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_neo": {"attention_types": [[["global"], 2]], "num_layers": 2, "num_heads": 4},
    "gemma4_unified_text": {**FEW, "global_head_dim": 16},
    "longcat_flash": {
        **MLP, **LATENT, "num_layers": 2, "num_key_value_heads": 4, "head_dim": 8, "moe_topk": 2,
        "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2,
    },
    "modernbert-decoder": {**FEW, "bos_token_id": 1},
}  # fmt: skip
# Those that attend to some of the keys: with many heads of an indexer no scores are alike.
INDEXED = {**FEW, **LATENT, "index_topk": 6, "index_head_dim": 16, "index_n_heads": 32}
OTHERS |= dict.fromkeys(
    ["axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"], INDEXED
)
# BERT and its kin, where they decode.
DECODING = {**FEW, "is_decoder": True, "embedding_size": HIDDEN}
BERTS = (
    "bert bert-generation camembert data2vec-text electra ernie megatron-bert roberta "
    "roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl"
)
GLYPHS = {"pronunciation_vocab_size": 8, "shape_vocab_size": 8}  # of RoCBert
OTHERS |= {name: {**DECODING, **GLYPHS} for name in BERTS.split()} | {
    "big_bird": {**DECODING, "attention_type": "original_full"},
    "rembert": {**DECODING, "input_embedding_size": HIDDEN, "output_embedding_size": HIDDEN},
    "xmod": {**DECODING, "default_language": "en_XX", "languages": ["en_XX"]},
}  # fmt: skip
# Those of images or sounds and text, used for text alone.
PATCHES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip


def with_images(text: dict[str, object], **vision: object) -> dict[str, object]:
    """Settings of a model with a small part for images beside that for texts."""
    return {
        "text_config": {**SIZES, "bos_token_id": 1, **text},
        "vision_config": {**PATCHES, **vision},
    }


OTHERS |= {
    "gemma3": with_images(ARCHITECTURES["gemma3_text"], model_type="siglip_vision_model"),
    "gemma4": with_images(ARCHITECTURES["gemma4_text"]),
    "gemma4_unified": with_images(OTHERS["gemma4_unified_text"]),
    "llama4": with_images(ARCHITECTURES["llama4_text"]),
    "got_ocr2": with_images({"model_type": "qwen2", **GROUPED}),
    "mllama": with_images(
        {
            **GROUPED, "cross_attention_layers": [],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        num_global_layers=1, attention_heads=2, intermediate_layers_indices=[0],
        vision_output_dim=32,
    ),
    "phi4_multimodal": {
        **FEW, "vision_config": {**PATCHES, "crop_size": 16},
        "audio_config": {
            "hidden_size": 16, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2,
            "ext_pw_out_channel": 16, "conv_channels": 8, "nemo_conv_channels": 8,
        },
    },
    "emu3": {
        "text_config": {**SIZES, **GROUPED, "bos_token_id": 1},
        "vq_config": {
            "base_channels": 32, "channel_multiplier": [1], "embed_dim": 8, "hidden_size": 16,
        },
    },
}  # fmt: skip


# Those of which layers carry a running state: convolutions, gated delta rules, Mamba 1 and 2. Of
# the latter some read prompts with time steps of at least some size, and single tokens with any.
THREE = {**FEW, "num_hidden_layers": 3}
DELTA = {
    **THREE, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
BETWEEN = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
CONVOLUTIONS = {**THREE, "conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"]}
MAMBA2 = {
    **THREE, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}  # fmt: skip
MAMBA = {"state_size": 8, "time_step_rank": 4, "intermediate_size": 64}
STATEFUL: dict[str, dict[str, object]] = {
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": {**CONVOLUTIONS, "num_dense_layers": 1},
    "lfm3": CONVOLUTIONS,
    "qwen3_next": {**DELTA, **BETWEEN},
    "qwen3_5_text": {**DELTA, **BETWEEN},
    "qwen3_5_moe_text": {**DELTA, **BETWEEN},
    "olmo_hybrid": {**DELTA, **BETWEEN},
    "lara_mini": {
        **DELTA, **SLIDING,
        "layer_types": ["linear_attention", "full_attention", "sliding_attention"],
    },
    "kimi_linear": {**DELTA, **LATENT, **BETWEEN},
    "bailing_hybrid": {**DELTA, **LATENT, **BETWEEN},
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "granitemoehybrid": {**MAMBA2, "layer_types": ["mamba", "attention", "mamba"]},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64},
    "nemotron_h": {
        **FEW, "num_hidden_layers": 4, "hybrid_override_pattern": "M*-M", "mamba_num_heads": 8,
        "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "conv_kernel": 4, "chunk_size": 16,
    },
    "zamba2": {
        **FEW, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2,
        "n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 8, "chunk_size": 16,
        "adapter_rank": 4,
    },
    "zamba": {
        **FEW, "num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid", "mamba"] * 2,
        "attn_layer_period": 3, "attn_layer_offset": 1, "n_mamba_heads": 2, "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "jamba": {
        **THREE, "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 3,
        "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16},
    "recurrent_gemma": {
        **THREE, "lru_width": HIDDEN, "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention", "recurrent"],
    },
    "minimax": {**THREE, **BETWEEN, "block_size": 4},
    "zaya": {**THREE, "num_experts_per_tok": 1},
    "qwen3_5": {"text_config": {**SIZES, **DELTA, **BETWEEN}},
    "qwen3_5_moe": {"text_config": {**SIZES, **DELTA, **BETWEEN}},
}  # fmt: skip
OTHERS |= STATEFUL


def tiny_model(name: str, options: dict[str, object]) -> PreTrainedModel:
    """A float32 model whose greedy text is varied: large weights, output head of its own."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.partition(":")[0], **SIZES | options)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(torch.randn(head.weight.shape))
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter is not head.weight:
            parameter.data.normal_(std=0.3)
    model.get_input_embeddings().weight.data.normal_()
    return model
