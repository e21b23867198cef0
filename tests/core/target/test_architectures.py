"""Any decoder-only architecture: greedy answers equal to `model.generate`, or a clear refusal."""

from pathlib import Path

import pytest
import torch
from architectures import (
    ARCHITECTURES,
    FEW,
    GROUPED,
    LATENT,
    OTHERS,
    SIZES,
    WINDOW,
    tiny_model,
)
from hidden_answers import check_every_right_token_is_accepted, generated
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from stages import more
from tiny import HIDDEN, VOCAB
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from drafthead.core.drafting.drafter import Drafter
from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.logit_finish import Finish
from drafthead.core.target.masks import LayerKind, key_positions, masks_by_kind
from drafthead.core.target.placement import Placement
from drafthead.core.target.target import Target
from drafthead.core.target.weight_state import state_of
from drafthead.infer import Decoder
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.engine.prefill import prefill

NEW = 20
ON_DISK = "llama", "gpt2", "gemma4_text", "deepseek_v3"  # in the first stage
PROMPT_LENGTHS = (3, 17, 9)  # within the window and beyond it


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_answers_equal_those_of_transformers(name: str) -> None:
    model = tiny_model(name, ARCHITECTURES[name])
    prompts = [torch.randint(1, VOCAB, (n,)).tolist() for n in PROMPT_LENGTHS]
    check_every_right_token_is_accepted(Target(model), prompts, NEW)


@pytest.mark.parametrize("name", [n if n in ON_DISK else more(n) for n in ARCHITECTURES])
def test_layers_on_disk_give_the_states_of_layers_in_memory(name: str, tmp_path: Path) -> None:
    tiny_model(name, ARCHITECTURES[name]).save_pretrained(tmp_path / "model")
    whole = load_decoder_only(tmp_path / "model", "float32", "cpu")
    placement = Placement("disk", offload_folder=str(tmp_path / "off"))
    elsewhere = load_decoder_only(tmp_path / "model", "float32", "cpu", placement=placement)
    assert all(next(layer.parameters()).is_meta for layer in elsewhere.layers.children())
    ids = torch.randint(1, VOCAB, (2, 11))
    positions = torch.arange(11).expand_as(ids)
    spec = FeatureSpec((-1, 0, whole.num_layers - 1, whole.num_layers))
    expected, found = (t.run(ids, positions, None, spec) for t in (whole, elsewhere))
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close([*found.features.taps], [*expected.features.taps])
    for read in (Target.output_weight, Target.input_weight):
        assert read(elsewhere).equal(read(whole))


CONSTANTS = {"logit_scale": 0.5, "logits_scaling": 0.25, "final_logit_softcapping": 3.0}


def any_small_model(name: str) -> PreTrainedModel | None:
    """A random float32 model with constants for its logits; None where these sizes make none."""
    own = ARCHITECTURES.get(name, FEW)
    for options in (own, {**own, **LATENT}):
        try:
            config = AutoConfig.for_model(name, **SIZES | options)
            for constant, value in CONSTANTS.items():
                if getattr(config, constant, None) is not None:
                    setattr(config, constant, value)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config).eval()
            if model.num_parameters() < 4e6:
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(config).float().eval()
                model(torch.tensor([[5, 6, 7]]))
                return model
        except Exception:  # as many kinds as there are models
            continue
    return None


def test_logits_by_formula_are_those_of_all_models_that_are_accepted() -> None:
    compared, scaled = [], []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if (model := any_small_model(name)) is None:
            continue
        before = state_of(model)
        try:
            target = Target(model)
        except UserError as error:
            assert "its logits are not" not in str(error)
            continue
        assert state_of(model) == before, "what the checks leave would be in the user's answers"
        ids = torch.randint(1, VOCAB, (2, 9))
        found = target.run(ids, torch.arange(9).expand_as(ids), None, FeatureSpec())
        torch.testing.assert_close(target.project(found.features.last), found.logits)
        compared.append(name)
        scaled += [name] if target.finish != Finish() else []
    assert len(compared) > 80 and len(scaled) > 10
    assert {"hyperclovax", "granite", "cohere", "gemma2"} <= {*scaled}


EVERY = {name: o for name, o in (ARCHITECTURES | OTHERS).items() if "text_config" not in o}
SLIDE_HERE = "llama", "mistral", "gemma2", "big_bird", "minimax", "zaya", "bloom"


@pytest.mark.parametrize("name", [name if name in SLIDE_HERE else more(name) for name in EVERY])
def test_a_window_is_read_as_the_models_own_code_reads_it_or_refused(name: str) -> None:
    try:
        model = tiny_model(name, {**EVERY[name], "sliding_window": WINDOW})
        target = Target(model)
    except (UserError, ValueError) as error:
        assert "sliding_window" in str(error)
        return
    ids, cache = torch.randint(4, VOCAB, (1, 18)), target.new_cache()
    _, hidden = prefill(target, ids, torch.tensor([18]), FeatureSpec(), cache, room=1, chunk=9)
    expected = model(ids, use_cache=False).logits[:, -1]
    torch.testing.assert_close(target.project(hidden), expected, rtol=1e-3, atol=1e-3)


REFUSED = {
    "rwkv": ({}, "keeps no key-value cache"),
    "xlm": ({}, "no decoder layers"),
    "deepseek_v4": ({}, "compressed_attention layers.*no tree mask"),
    "mpt": ({}, "MptForCausalLM.*counts positions by itself"),
    "gpt_neo": ({"attention_types": [[["global", "local"], 1]]}, "columns of the cache"),
    "llama4_text": ({"no_rope_layers": [1, 0]}, "columns of the cache"),
    "xlnet": ({}, "keeps no key-value cache"),
    "inkling_text": ({}, "counts distances in columns of the cache"),
    "bert": ({}, "each token also sees those after it.*set is_decoder"),
    "opt": (
        {"word_embed_proj_dim": 24, "do_layer_norm_before": False},
        "output head reads states of another",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_targets_that_cannot_hold_a_tree_are_refused_with_the_reason(name: str) -> None:
    options, reason = REFUSED[name]
    config = AutoConfig.for_model(name, **{"num_hidden_layers": 2} | options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).eval()
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
    target = load_decoder_only(tmp_path, dtype="float32", device="cpu")
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
