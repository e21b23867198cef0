"""Models of GGUF files compute what the models that were written compute, or are refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_writing import TOKENS, write_gguf
from tiny import byte_tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from drafthead.core.errors import UserError
from drafthead.core.target import blocks
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.block_modules import InBlocks
from drafthead.core.target.gguf_files import model_folder
from drafthead.core.target.gguf_header import COMPARED
from drafthead.core.target.target import Target

WINDOW, LENGTH = 6, 100
IDS = torch.randint(4, TOKENS, (2, LENGTH), generator=torch.Generator().manual_seed(0))
Q8_0 = gguf.GGMLQuantizationType.Q8_0
SIZES = {
    "vocab_size": TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "initializer_range": 0.3,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 64}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "norm_topk_prob": True}  # fmt: skip
KEYS = {
    "context_length": 128, "embedding_length": 32, "block_count": 2, "attention.head_count": 4,
}  # fmt: skip
GROUPED_KEYS = {**KEYS, "attention.head_count_kv": 2, "feed_forward_length": 64}
RMS, ROPE = {"attention.layer_norm_rms_epsilon": 1e-5}, {"rope.freq_base": 5000.0}
WIDE = {"attention.key_length": 16, "attention.value_length": 16}
THETA = {"rope_type": "default", "rope_theta": 5000.0}
LINEAR = {"rope_type": "linear", "factor": 8.0}
WIDE_THETA = {"head_dim": 16, "rms_norm_eps": 1e-5, "rope_parameters": THETA}


def partial_rope(share: float) -> dict[str, object]:
    return {"rope_parameters": {**THETA, "partial_rotary_factor": share}}


# Of each architecture: transformers' name, its settings, and the keys of the file.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], dict[str, object]]] = {
    "llama": ("llama", {**GROUPED, **WIDE_THETA},
              {**GROUPED_KEYS, **RMS, **ROPE, **WIDE, "rope.dimension_count": 16,
               "vocab_size": TOKENS, "expert_count": 0}),
    "qwen2": ("qwen2", {**GROUPED, "rms_norm_eps": 1e-5, "rope_parameters": THETA},
              {**GROUPED_KEYS, **RMS, **ROPE}),
    "qwen2moe": ("qwen2_moe", {**GROUPED, **EXPERTS, "norm_topk_prob": False,
                               "shared_expert_intermediate_size": 32, "rms_norm_eps": 1e-5,
                               "rope_parameters": THETA},
                 {**GROUPED_KEYS, **RMS, **ROPE, "expert_count": 4, "expert_used_count": 2,
                  "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 32}),
    "qwen3": ("qwen3", {**GROUPED, **WIDE_THETA}, {**GROUPED_KEYS, **RMS, **ROPE, **WIDE}),
    "qwen3moe": ("qwen3_moe", {**GROUPED, **EXPERTS, **WIDE_THETA},
                 {**GROUPED_KEYS, **RMS, **ROPE, **WIDE, "expert_count": 4,
                  "expert_used_count": 2, "expert_feed_forward_length": 32}),
    "gemma2": ("gemma2", {**GROUPED, **WIDE_THETA, **MIXED, "query_pre_attn_scalar": 16,
                          "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
               {**GROUPED_KEYS, **RMS, **ROPE, **WIDE, "attention.sliding_window": WINDOW,
                "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", {**GROUPED, **WIDE_THETA, "query_pre_attn_scalar": 16,
                               "num_hidden_layers": 7, "sliding_window": WINDOW,
                               "rope_parameters": {
                                   "full_attention": {**THETA, **LINEAR},
                                   "sliding_attention": {**THETA, "rope_theta": 10000.0}}},
               {**GROUPED_KEYS, **RMS, **ROPE, **WIDE, "attention.sliding_window": WINDOW,
                "block_count": 7, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}),
    "phi3": ("phi3", {**GROUPED, "rms_norm_eps": 1e-5, **MIXED, **partial_rope(0.5)},
             {**GROUPED_KEYS, **RMS, **ROPE, "rope.dimension_count": 4,
              "attention.sliding_window": WINDOW}),
    "starcoder2": ("starcoder2", {**GROUPED, "norm_epsilon": 1e-4, "rope_parameters": THETA},
                   {**GROUPED_KEYS, **ROPE, "attention.layer_norm_epsilon": 1e-4}),
    "stablelm": ("stablelm", {**GROUPED, "layer_norm_eps": 1e-4, **partial_rope(0.5),
                              "use_qkv_bias": True},
                 {**GROUPED_KEYS, **ROPE, "attention.layer_norm_epsilon": 1e-4,
                  "rope.dimension_count": 4, "use_parallel_residual": False}),
    "gpt2": ("gpt2", {"n_inner": 64, "layer_norm_epsilon": 1e-4},
             {**KEYS, "feed_forward_length": 64, "attention.layer_norm_epsilon": 1e-4}),
    "nemotron": ("nemotron", {**GROUPED, "norm_eps": 1e-4, "head_dim": 8, **partial_rope(0.5)},
                 {**GROUPED_KEYS, **ROPE, "attention.layer_norm_epsilon": 1e-4,
                  "rope.dimension_count": 4, "rope.scaling.type": "none"}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def model_of(name: str, settings: Mapping[str, object]) -> PreTrainedModel:
    """A random float32 model; norms and biases are random too."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, **settings})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return model.requires_grad_(False)


def check_equal(path: Path, model: PreTrainedModel) -> Target:
    """The file's model computes the logits of the one that was written."""
    target = load_decoder_only(path, "float32", "cpu")
    found, wanted = (each(IDS).logits for each in (target.model, model))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    return target


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_file_computes_what_was_written(tmp_path, arch) -> None:
    name, settings, keys = ARCHITECTURES[arch]
    path = tmp_path / "small.gguf"
    model = write_gguf(path, model_of(name, settings), arch, keys, kind=Q8_0)
    check_equal(path, model)
    check_in_blocks(path, model)


def check_in_blocks(path: Path, model: PreTrainedModel) -> None:
    """By default all matrices but those of experts stay in blocks, and compute nearly the same."""
    loaded = load_decoder_only(path, device="cpu").model
    wanted, found = (each(IDS).logits.float() for each in (model, loaded))
    assert (found - wanted).norm() < 0.15 * wanted.norm()  # bfloat16 and rounded inputs
    for name, part in loaded.named_modules():
        is_matrix = isinstance(part, nn.Linear | Conv1D | nn.Embedding)
        assert not is_matrix or name.endswith("shared_expert_gate"), "a row in files"
    assert sum(isinstance(part, InBlocks) for part in loaded.modules()) > 8


def test_every_architecture_that_is_accepted_is_compared_here() -> None:
    assert sorted(ARCHITECTURES) == sorted(COMPARED)


# ---- rotary positions, in keys and in tensors ----------------------------------------------------

LLAMA, LLAMA_SETTINGS, LLAMA_KEYS = ARCHITECTURES["llama"]
SCALINGS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "linear": ({"rope_type": "linear", "factor": 4.0},
               {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "linear, of old files": ({"rope_type": "linear", "factor": 4.0}, {"rope.scale_linear": 4.0}),
    "none, though there is a factor": ({}, {"rope.scaling.type": "none",
                                            "rope.scaling.factor": 4.0}),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
             {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
              "rope.scaling.original_context_length": 32, "rope.scaling.finetuned": True}),
    "yarn, of other speeds": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
         "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5 * (1 + 0.1 * np.log(4))},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
         "rope.scaling.original_context_length": 32, "rope.scaling.yarn_beta_fast": 16.0,
         "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.attn_factor": 1.5}),
}  # fmt: skip


def llama_with(rope: Mapping[str, object]) -> PreTrainedModel:
    return model_of(LLAMA, {**LLAMA_SETTINGS, "rope_parameters": {**THETA, **rope}})


@pytest.mark.parametrize("case", SCALINGS)
def test_scaling_in_the_keys_is_read(tmp_path, case) -> None:
    rope, keys = SCALINGS[case]
    path = tmp_path / "small.gguf"
    check_equal(path, write_gguf(path, llama_with(rope), "llama", {**LLAMA_KEYS, **keys}))


def factors_of(model: PreTrainedModel) -> np.ndarray:
    """What a model's frequencies are divided by."""
    frequencies = model.model.rotary_emb.inv_freq.double().numpy()
    return 5000.0 ** (-np.arange(len(frequencies)) / len(frequencies)) / frequencies


@pytest.mark.parametrize(
    ("factor", "low", "high", "original"),
    [(8.0, 1.0, 4.0, 64), (32.0, 1.0, 4.0, 40), (4.0, 1.0, 16.0, 100), (8.0, 2.0, 8.0, 128)],
)
def test_factors_of_llama_3_become_its_settings(tmp_path, factor, low, high, original) -> None:
    rope = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low,
        "high_freq_factor": high, "original_max_position_embeddings": original,
    }  # fmt: skip
    model, path = llama_with(rope), tmp_path / "small.gguf"
    tensors = {"rope_freqs.weight": factors_of(model)}
    target = check_equal(path, write_gguf(path, model, "llama", LLAMA_KEYS, more=tensors))
    assert target.config.rope_parameters["rope_type"] == "llama3"


def test_factors_without_a_formula_are_kept_as_they_are(tmp_path) -> None:
    factors = np.linspace(1, 3, 8) ** 2
    explicit = {
        "rope_type": "longrope", "short_factor": factors.tolist(), "long_factor": factors.tolist(),
        "original_max_position_embeddings": 128, "attention_factor": 1.0,
    }  # fmt: skip
    path = tmp_path / "small.gguf"
    model = write_gguf(
        path, llama_with(explicit), "llama", LLAMA_KEYS, more={"rope_freqs.weight": factors}
    )
    target = check_equal(path, model)
    assert target.max_length == 128


def test_long_and_short_factors_of_phi3_are_read(tmp_path) -> None:
    name, settings, keys = ARCHITECTURES["phi3"]
    short, long = np.linspace(1, 2, 2), np.linspace(2, 9, 2)
    rope = {
        **settings["rope_parameters"], "rope_type": "longrope", "short_factor": short.tolist(),
        "long_factor": long.tolist(), "original_max_position_embeddings": 64,
    }  # fmt: skip
    settings = {**settings, "rope_parameters": rope, "original_max_position_embeddings": 64}
    path, model = tmp_path / "small.gguf", model_of(name, settings)
    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    more = {"rope.scaling.original_context_length": 64}
    check_equal(path, write_gguf(path, model, "phi3", {**keys, **more}, more=tensors))


# ---- ends, text, and what is refused -------------------------------------------------------------


def test_the_ends_of_texts_turns_and_messages_end_answers(tmp_path) -> None:
    def others(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(3)
        writer.add_eom_token_id(2)

    path = tmp_path / "small.gguf"
    write_gguf(path, llama_with({}), "llama", LLAMA_KEYS, others=others)
    assert load_decoder_only(path).end_ids == {1, 2, 3}


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["it", "'s", "Ġ123", "'", "LL"]),
        ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "'", "LL"]),
        ("llama-bpe", ["it", "'s", "Ġ", "123", "'LL"]),
        ("stablelm2", ["it", "'s", "Ġ", "1", "2", "3", "'LL"]),
    ],
)
def test_text_is_cut_as_the_file_says(tmp_path, pre, pieces) -> None:
    path = tmp_path / "small.gguf"
    write_gguf(path, llama_with({}), "llama", LLAMA_KEYS, pre=pre)
    backend = AutoTokenizer.from_pretrained(model_folder(path)).backend_tokenizer
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("it's 123'LL")] == pieces
    assert backend.encode("a").ids == byte_tokenizer()("a")["input_ids"]


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "a key that nothing reads": (
        {"keys": {"residual_scale": 0.5}}, "llama.residual_scale is 0.5, which nothing here reads"
    ),
    "a setting that the model lacks": (
        {"keys": {"final_logit_softcapping": 30.0}}, "llama.final_logit_softcapping is 30.0"
    ),
    "experts": ({"keys": {"expert_count": 8}}, "llama.expert_count is 8"),
    "layers that differ": (
        {"keys": {"attention.head_count_kv": [2, 1]}}, r"head_count_kv is \[2, 1\], for which"
    ),
    "a part of a head that is not rotated": (
        {"keys": {"rope.dimension_count": 8}}, "llama.rope.dimension_count is 8"
    ),
    "another scaling": ({"keys": {"rope.scaling.type": "su"}}, "rope.scaling.type is su"),
    "two scalings": (
        {"keys": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
         "more": {"rope_freqs.weight": np.full(8, 2.0)}}, "rope_freqs.weight holds other factors"
    ),
    "a tensor without a place": (
        {"more": {"blk.0.attn_q.bias": np.ones(64)}}, "no place for 1 .* such as blk.0.attn_q.bias"
    ),
    "another cut of text": ({"pre": "viking"}, "tokenizer.ggml.pre is viking"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_a_model_cannot_follow_is_refused_by_name(tmp_path, case) -> None:
    changes, sentence = REFUSALS[case]
    path = tmp_path / "small.gguf"
    given = {**changes, "keys": {**LLAMA_KEYS, **changes.get("keys", {})}}
    write_gguf(path, llama_with({}), "llama", **given)
    with pytest.raises(UserError, match=sentence) as error:
        load_decoder_only(path, "float32", "cpu")
    assert str(path) in str(error.value)


def test_blocks_that_the_package_gguf_reads_otherwise_are_refused(tmp_path, monkeypatch) -> None:
    path = tmp_path / "small.gguf"
    write_gguf(path, llama_with({}), "llama", LLAMA_KEYS, kind=Q8_0)
    wrong = blocks.KINDS["Q8_0"]._replace(parts=lambda raw: blocks.q8_0(raw.roll(1, -1)))
    monkeypatch.setitem(blocks.KINDS, "Q8_0", wrong)
    with pytest.raises(UserError, match=r"package gguf reads token_embd\.weight differently"):
        load_decoder_only(path)
