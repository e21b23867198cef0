"""Layouts of other projects: their names and their keys are read as the head that they hold.

The sets of names and keys are those that the projects' own code writes (Model-Optimizer and
SpecForge of August 2026, Automodel 26.08, TorchSpec and DeepSpec of April and June 2026).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from written import DFLASH, DSPARK, EAGLE3, TARGET, random_head

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.heads.base import DraftHead
from drafthead.heads.formats import load_head, read_foreign
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.formats.exporting import export_head

Tensors = dict[str, torch.Tensor]
Keys = dict[str, Any]
# Of transformers, as every project writes them.
SHAPE = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size"),
    *("num_hidden_layers", "tie_word_embeddings", "attention_bias", "rope_theta"),
)
WRITER = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02,
    "use_cache": True, "torch_dtype": "bfloat16", "transformers_version": "4.57.1",
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "max_window_layers": 5, "sliding_window": None, "rope_scaling": None,
    "use_sliding_window": False, "layer_types": ["full_attention"] * 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    return Target(LlamaForCausalLM(TARGET))


class Layout:
    """A head as our exporter writes it, to be rewritten as another project does."""

    def __init__(self, folder: Path, target: Target, format_name: str, family: str, options: Keys):
        self.folder, self.target = folder, target
        torch.manual_seed(1)
        self.head = random_head(family, target, options)
        export_head(self.head, TargetFacts.of(target), target, format_name, folder)
        self.tensors = load_file(folder / "model.safetensors")
        self.written = json.loads((folder / "config.json").read_text())
        self.shape = {key: self.written[key] for key in SHAPE if key in self.written}

    def rewrite(self, tensors: Tensors, config: Keys) -> Path:
        save_file(tensors, self.folder / "model.safetensors")
        (self.folder / "config.json").write_text(json.dumps(config))
        return self.folder

    def renamed(self, name: Callable[[str], str]) -> Tensors:
        return {name(old): tensor for old, tensor in self.tensors.items()}

    def assert_read_as_written(self, **differing: Any) -> DraftHead:
        """The head is the same, but for options that the other layout states differently."""
        found = load_head(self.folder, self.target)
        expected = self.head.state_dict()
        assert set(expected) == set(found.state_dict())
        for name, tensor in found.state_dict().items():
            assert torch.equal(tensor, expected[name]), name
        for option in ("taps", "num_layers", *differing):
            wanted = differing.get(option, getattr(self.head.config, option))
            assert getattr(found.config, option) == wanted, option
        return found


@pytest.fixture
def layout(tmp_path: Path, target: Target) -> Callable[..., Layout]:
    return lambda name, family, options: Layout(tmp_path / "head", target, name, family, options)


# Names that wrap or prefix others


@pytest.mark.parametrize(
    "outer", ["_orig_mod.", "module.", "module._orig_mod.", "model.", "draft_model."]
)
@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("dflash", "parallel", DFLASH),
        ("vllm-medusa", "medusa", {}),
        ("eagle3-vllm", "eagle3", {"draft_vocab_size": 40}),
    ],
)
def test_names_of_what_training_wraps_are_read(outer, name, kind, options, layout) -> None:
    made = layout(name, kind, options)
    made.rewrite(made.renamed(lambda old: outer + old), made.written)
    expected, found = made.head.state_dict(), load_head(made.folder, made.target).state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_a_compiled_module_inside_is_read(layout) -> None:
    made = layout("dflash", "parallel", DFLASH)
    inside = made.renamed(lambda old: old.replace("self_attn.", "self_attn._orig_mod."))
    made.rewrite(inside, made.written)
    made.assert_read_as_written()


def test_two_names_of_one_tensor_are_refused(layout) -> None:
    made = layout("dflash", "parallel", DFLASH)
    twice = {**made.tensors, "model.norm.weight": made.tensors["norm.weight"].clone()}
    made.rewrite(twice, made.written)
    with pytest.raises(UserError, match="'model.norm.weight' and 'norm.weight', which are one"):
        load_head(made.folder, made.target)


# DFlash and DSpark


def model_optimizer(name: str) -> str:
    """Its names of DSpark's parts have no module before them."""
    return name.replace("markov_head.", "").replace("confidence_head.proj.", "confidence_proj.")


@pytest.mark.parametrize(
    ("kind", "correction"), [("vanilla", "markov"), ("gated", "gated"), ("rnn", "recurrent")]
)
def test_dspark_of_model_optimizer_is_read(kind, correction, layout) -> None:
    made = layout("dspark", "parallel", {**DSPARK, "correction": correction})
    own = {"embed_tokens.weight", "lm_head.weight"}
    tensors = {name: t for name, t in made.renamed(model_optimizer).items() if name not in own}
    config = {
        "architectures": ["DFlashDraftModel"], **made.shape, **WRITER,
        "model_type": "qwen3", "layer_types": ["full_attention"] * 2, "rope_scaling": None,
        "block_size": 5, "num_target_layers": 8,
        "dflash_config": {
            "mask_token_id": DSPARK["mask_token"], "target_layer_ids": [1, 4, 6],
            "projector_type": "dspark", "shift_label": True, "markov_rank": 6,
            "markov_head_type": kind, "use_confidence_head": True,
        },
    }  # fmt: skip
    made.rewrite(tensors, config)
    made.assert_read_as_written(root_predicts=True, correction=correction)


def test_dspark_of_specforge_is_read(layout) -> None:
    """Its labels begin after the anchor, which its files do not state."""
    made = layout("dspark", "parallel", DSPARK)
    tensors = {
        n: t for n, t in made.tensors.items() if n.split(".")[0] not in ("lm_head", "embed_tokens")
    }
    config = {
        "architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        **made.shape, **WRITER, **QWEN3, "dtype": "bfloat16", "pad_token_id": 3,
        "block_size": 5, "num_target_layers": 8, "target_hidden_size": None,
        "dflash_config": {
            "attention_mode": "gqa", "confidence_head_alpha": 1.0,
            "confidence_head_with_markov": True, "enable_confidence_head": True,
            "markov_head_type": "vanilla", "markov_rank": 6, "projector_type": "dspark",
            "mask_token_id": DSPARK["mask_token"], "target_layer_ids": [1, 4, 6],
        },
    }  # fmt: skip
    made.rewrite(tensors, config)
    made.assert_read_as_written(root_predicts=True)


def torchspec(name: str) -> str:
    renames = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}
    for ours, theirs in renames.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def torchspec_config(made: Layout) -> Keys:
    """Here `num_target_layers` counts the layers that are tapped."""
    left_out = {"hidden_act", "attention_bias", "head_dim"}
    shape = {key: value for key, value in made.shape.items() if key not in left_out}
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "dflash", **shape,
        "num_target_layers": 3, "target_hidden_size": 32, "target_num_hidden_layers": 8,
        "target_layer_ids": [1, 4, 6], "mask_token_id": DFLASH["mask_token"],
    }  # fmt: skip


def test_dflash_of_torchspec_is_read_when_the_block_is_known(layout, target) -> None:
    made = layout("dflash", "parallel", DFLASH)
    copy = {"embed_tokens.weight": target.input_weight().detach().clone()}
    config = torchspec_config(made)
    made.rewrite({**made.renamed(torchspec), **copy}, config)
    with pytest.raises(UserError, match="block_size is missing"):  # it is in no file of theirs
        load_head(made.folder, target)
    (made.folder / "config.json").write_text(json.dumps({**config, "block_size": 5}))
    made.assert_read_as_written()


def test_a_count_of_layers_that_is_neither_is_refused(layout, target) -> None:
    made = layout("dflash", "parallel", DFLASH)
    config = {**torchspec_config(made), "num_target_layers": 8}
    made.rewrite(made.renamed(torchspec), config)
    with pytest.raises(UserError, match="num_target_layers is 8"):
        load_head(made.folder, target)


# EAGLE-3


def test_eagle3_of_automodel_is_read(layout) -> None:
    made = layout("eagle3-vllm", "eagle3", {"draft_vocab_size": 40, "embeddings": "own"})
    outside = ("lm_head.weight", "d2t", "t2d")
    tensors = made.renamed(lambda name: name if name in outside else f"model.{name}")
    config = {
        "architectures": ["LlamaEagle3DraftModel"], "model_type": "llama", **made.shape, **WRITER,
        "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None, "draft_vocab_size": 40,
        "num_aux_hidden_states": 3, "target_hidden_size": 32, "fc_norm": True, "norm_output": True,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True,
        },
    }  # fmt: skip
    made.rewrite(tensors, config)
    made.assert_read_as_written(norm_feedback=True)


def p_eagle(layout: Callable[..., Layout], mask: Keys) -> Layout:
    """A P-EAGLE head, which we export to `speculators` alone, in Automodel's layout."""
    options = {**EAGLE3, "num_layers": 2, "embeddings": "own"}
    made = layout("eagle3-vllm", "eagle3", options)
    made.head = random_head("eagle3", made.target, {**options, "mask_token": 5})
    tensors = {
        name if name in ("mask_hidden", "lm_head.weight") else f"model.{name}": tensor.contiguous()
        for name, tensor in made.head.state_dict().items()
    }
    config = {
        "architectures": ["LlamaEagle3DraftModel"], "model_type": "llama", **made.shape,
        **WRITER, "mlp_bias": False, "parallel_drafting": True, "num_depths": 4,
        "draft_vocab_size": made.shape["vocab_size"], **mask,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    }  # fmt: skip
    made.rewrite(tensors, config)
    return made


@pytest.mark.parametrize("key", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_p_eagle_outside_of_speculators_is_read(key, layout) -> None:
    """With Automodel's key for the mask, or vLLM's."""
    p_eagle(layout, {key: 5}).assert_read_as_written(mask_token=5)


@pytest.mark.parametrize(
    ("mask", "complaint"),
    [
        ({}, "mask_token_id is missing"),
        ({"mask_token_id": 5, "pard_token": 6}, r"mask_token_id is \[5, 6\], but must be one"),
    ],
)
def test_the_mask_of_p_eagle_must_be_known(mask, complaint, layout, target) -> None:
    folder = p_eagle(layout, mask).folder
    with pytest.raises(UserError, match=complaint):
        load_head(folder, target)


def test_eagle3_of_deepspec_with_five_taps_is_read(layout) -> None:
    """Its ids are `hidden_states[id + 1]`, in which the last one is after the final norm."""
    taps = (0, 2, 4, 6, 8)
    options = {**EAGLE3, "taps": taps, "qk_norm": True, "embeddings": "own"}
    made = layout("eagle3-vllm", "eagle3", {**options, "taps": (0, 2, 4, 5, 6)})
    config = {
        "architectures": ["Qwen3Eagle3Model"], **made.shape, **WRITER, **QWEN3,
        "layer_types": ["full_attention"], "num_hidden_layers": 1, "draft_num_hidden_layers": 1,
        "num_target_layers": 8, "target_layer_ids": [0, 2, 4, 6, 7], "ttt_length": 7,
        "step_loss_decay": 0.8, "target_model_name_or_path": "Qwen/Qwen3-8B",
    }  # fmt: skip
    made.rewrite(made.tensors, config)
    made.assert_read_as_written(taps=taps)
    _, foreign = read_foreign(made.folder, TargetFacts())
    assert foreign.target.name == "Qwen/Qwen3-8B"
    assert not foreign.needs_target


def test_eagle3_of_model_optimizer_is_read(layout) -> None:
    made = layout("eagle3-vllm", "eagle3", {**EAGLE3, "draft_vocab_size": 40})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **made.shape, **WRITER,
        "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None, "draft_vocab_size": 40,
        "pad_token_id": None,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
            "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": None,
        },
    }  # fmt: skip
    made.rewrite(made.tensors, config)
    made.assert_read_as_written()
    config["eagle_config"]["parallel_draft_step"] = 4
    (made.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="eagle_config.parallel_draft_step is 4: our heads draft"):
        load_head(made.folder, made.target)


SPECFORGE_EAGLE3: dict[str, Keys] = {
    "llama3": {"mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None},
    "qwen3-moe": {
        "max_window_layers": 48, "sliding_window": None, "use_sliding_window": False,
        "decoder_sparse_step": 1, "rope_scaling": None,
    },
    "gpt-oss": {"sliding_window": 16, "pad_token_id": 3},
    "qwen2.5-vl": {
        "target_model_type": "qwen2_5_vl", "sliding_window": 16, "use_sliding_window": False,
        "max_window_layers": 28, "rope_scaling": {"mrope_section": [2, 1, 1], "type": "mrope"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SPECFORGE_EAGLE3)
def test_eagle3_of_specforge_is_read(name, layout) -> None:
    made = layout("eagle3-sglang", "eagle3", {**EAGLE3, "draft_vocab_size": 40})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **made.shape, **WRITER,
        "draft_vocab_size": 40, **SPECFORGE_EAGLE3[name],
    }  # fmt: skip
    made.rewrite(made.tensors, config)
    made.assert_read_as_written()


def test_a_published_eagle3_configuration_repeats_the_targets_layers(layout) -> None:
    made = layout("eagle3-sglang", "eagle3", EAGLE3)
    made.rewrite(made.tensors, {**made.written, "num_hidden_layers": 40})
    made.assert_read_as_written()
    _, foreign = read_foreign(made.folder, TargetFacts.of(made.target))
    assert any("num_hidden_layers says 40" in note for note in foreign.notes)


def test_layers_of_vllms_names_must_be_as_many_as_stated(layout, target) -> None:
    made = layout("eagle3-vllm", "eagle3", {})
    made.rewrite(made.tensors, {**made.written, "num_hidden_layers": 2})
    with pytest.raises(UserError, match="num_hidden_layers 2, but the tensors have 1"):
        load_head(made.folder, target)


def test_a_padded_vocabulary_marks_no_tokens_in_its_padding(layout, target) -> None:
    made = layout("eagle3-vllm", "eagle3", {"draft_vocab_size": 40})
    marks = made.tensors["t2d"]
    last = int(marks.nonzero().max())
    for stored in (marks[: last + 1], torch.cat([marks, torch.zeros(24, dtype=torch.bool)])):
        made.rewrite({**made.tensors, "t2d": stored.clone()}, made.written)
        made.assert_read_as_written()
    for stored in (marks[:last], torch.cat([marks, torch.ones(1, dtype=torch.bool)])):
        made.rewrite({**made.tensors, "t2d": stored.clone()}, made.written)
        with pytest.raises(UserError, match="t2d marks other tokens"):
            load_head(made.folder, target)
