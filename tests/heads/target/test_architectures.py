"""Any decoder-only architecture: greedy answers equal to `model.generate`, or a clear refusal."""

from pathlib import Path

import pytest
import torch
from hidden_answers import check_every_right_token_is_accepted, generated
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from tiny import HIDDEN, VOCAB
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.errors import UserError
from drafthead.heads.target.features import FeatureSpec
from drafthead.heads.target.masks import LayerKind, key_positions, masks_by_kind
from drafthead.heads.target.placement import Placement
from drafthead.heads.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.drafters.prompt_lookup import PromptLookup

WINDOW, NEW = 6, 20
PROMPT_LENGTHS = (3, 17, 9)  # within the window and beyond it
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


def tiny_model(name: str, options: dict[str, object]) -> PreTrainedModel:
    """A float32 model whose greedy text is varied: large weights, output head of its own."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.partition(":")[0], **SIZES | options)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN))
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter is not head.weight:
            parameter.data.normal_(std=0.3)
    model.get_input_embeddings().weight.data.normal_()
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_answers_equal_those_of_transformers(name: str) -> None:
    model = tiny_model(name, ARCHITECTURES[name])
    prompts = [torch.randint(1, VOCAB, (n,)).tolist() for n in PROMPT_LENGTHS]
    check_every_right_token_is_accepted(Target(model), prompts, NEW)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_on_disk_give_the_states_of_layers_in_memory(name: str, tmp_path: Path) -> None:
    tiny_model(name, ARCHITECTURES[name]).save_pretrained(tmp_path / "model")
    whole = Target.from_pretrained(tmp_path / "model", "float32", "cpu")
    placement = Placement("disk", offload_folder=str(tmp_path / "off"))
    elsewhere = Target.from_pretrained(tmp_path / "model", "float32", "cpu", placement=placement)
    assert all(next(layer.parameters()).is_meta for layer in elsewhere.layers.children())
    ids = torch.randint(1, VOCAB, (2, 11))
    positions = torch.arange(11).expand_as(ids)
    spec = FeatureSpec((-1, 0, whole.num_layers - 1, whole.num_layers))
    expected, found = (t.run(ids, positions, None, spec) for t in (whole, elsewhere))
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close([*found.features.taps], [*expected.features.taps])
    for read in (Target.output_weight, Target.input_weight):
        assert read(elsewhere).equal(read(whole))


REFUSED = {
    "mamba": ({}, "MambaForCausalLM has linear_attention layers.*running state"),
    "qwen3_next": ({"num_hidden_layers": 4}, "linear_attention layers.*running state"),
    "falcon_h1": ({}, "hybrid layers.*running state"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "conv layers.*running state"),
    "rwkv": ({}, "keeps no key-value cache"),
    "xlm": ({}, "no decoder layers"),
    "deepseek_v32": ({}, "indexed_attention layers.*no tree mask"),
    "mpt": ({}, "MptForCausalLM.*counts positions by itself"),
    "gpt_neo": ({"attention_types": [[["global", "local"], 1]]}, "columns of the cache"),
    "llama4_text": ({"no_rope_layers": [1, 0]}, "columns of the cache"),
    "modernbert-decoder": ({}, "no final norm"),
    "bert": ({"is_decoder": True}, "no decoder layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_targets_that_cannot_hold_a_tree_are_refused_with_the_reason(name: str) -> None:
    options, reason = REFUSED[name]
    config = AutoConfig.for_model(name, **{"num_hidden_layers": 2} | options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=reason):
        Target(model)


def test_loops_that_share_keys_are_refused(make_target) -> None:
    model = make_target().model
    model.config.recurrent_kv_cache_mode = "last_loop"  # of Dory, which transformers 5.23 lacks
    with pytest.raises(UserError, match="loops share the keys of the last one"):
        Target(model)


def test_attention_that_takes_no_mask_is_refused(make_target) -> None:
    model = make_target().model
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="flash_attention_2 attention.*attn_implementation='sdpa'"):
        Target(model)


# ---- masks ------------------------------------------------------------------------------------


def mask_of(rows: list[str]) -> torch.Tensor:
    """The additive mask [1, 1, T, S] of a drawing, 1 where a key is seen."""
    seen = torch.tensor([[mark == "1" for mark in row] for row in rows])
    return torch.zeros(1, 1, *seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def drawing(mask: torch.Tensor) -> list[str]:
    """The drawing of a mask [1, 1, T, S]."""
    return ["".join("1" if n == 0 else "." for n in row) for row in mask[0, 0].tolist()]


# Three committed tokens, a gap to a longer row, then a root with two children and a grandchild.
NODES = mask_of(["111..1...", "111..11..", "111..1.1.", "111..1.11"])


def test_a_keys_rank_among_those_seen_is_its_position() -> None:
    assert key_positions(NODES)[0, 0, 3, [0, 1, 2, 5, 7, 8]].tolist() == [0, 1, 2, 3, 4, 5]


def test_each_kind_of_layer_gets_what_is_within_its_reach() -> None:
    kinds = (
        LayerKind("full_attention"),
        LayerKind("sliding_attention", window=3),
        LayerKind("chunked_attention", chunk=4),
    )
    masks = masks_by_kind(NODES, kinds)
    assert masks["full_attention"] is NODES
    assert drawing(masks["sliding_attention"]) == [
        ".11..1...",
        "..1..11..",
        "..1..1.1.",
        ".....1.11",
    ]
    assert drawing(masks["chunked_attention"]) == [
        "111..1...",
        "......1..",
        ".......1.",
        ".......11",
    ]


def test_layers_of_one_kind_share_one_mask() -> None:
    masks = masks_by_kind(NODES, (LayerKind("sliding_attention", window=3),))
    assert drawing(masks)[3] == ".....1.11"


def test_nothing_is_computed_while_nothing_is_out_of_reach() -> None:
    kinds = (LayerKind("full_attention"), LayerKind("sliding_attention", window=9))
    assert masks_by_kind(NODES, kinds) is NODES


# ---- adapters and quantised weights -----------------------------------------------------------


def with_lora(model: PreTrainedModel) -> PeftModel:
    """A LoRA adapter that changes what the model says."""
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.3)
    return adapted


def check_against_generate(target: Target, model: PreTrainedModel, drafter: Drafter) -> None:
    """Plain and drafted answers equal those of the model that the target was made of."""
    prompt = list(range(10, 19))
    expected = generated(model, prompt, NEW)
    assert Decoder(target).generate(prompt, max_new_tokens=NEW).sequences == [expected]
    assert Decoder(target, drafter).generate(prompt, max_new_tokens=NEW).sequences == [expected]


def test_a_wrapped_adapter_counts(make_drafter) -> None:
    bare = generated(tiny_model("llama", GROUPED), list(range(10, 19)), NEW)
    adapted = with_lora(tiny_model("llama", GROUPED))
    assert generated(adapted, list(range(10, 19)), NEW) != bare
    target = Target(adapted)
    check_against_generate(target, adapted, make_drafter("medusa:tree", target))


def test_an_adapters_folder_is_a_target(tmp_path) -> None:
    """It holds neither weights nor tokenizer of its base model."""
    base = Path(__file__).parents[3] / "assets" / "demo_target"
    adapted = with_lora(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    adapted.save_pretrained(tmp_path)
    target = Target.from_pretrained(tmp_path, dtype="float32", device="cpu")
    assert target.tokenizer is not None
    check_against_generate(target, adapted, PromptLookup(depth=3))


def test_prompt_tuning_is_refused(make_target) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(UserError, match="PROMPT_TUNING.*learned prompt"):
        Target(get_peft_model(make_target().model, config))


def test_quantised_layers_are_run_as_they_are(make_drafter) -> None:
    """Half-precision weights in packed form, which are no parameters and have no `weight`."""
    model = torch.ao.quantization.quantize_dynamic(
        tiny_model("llama", GROUPED), {nn.Linear}, dtype=torch.float16
    )
    target = Target(model)
    assert not isinstance(target.output_head.weight, torch.Tensor)
    assert target.output_weight().shape == (VOCAB, HIDDEN)
    check_against_generate(target, model, make_drafter("medusa:tree", target))
