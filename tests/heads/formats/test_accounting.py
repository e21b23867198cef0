"""Every key of a configuration is read, known to change nothing, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damaged import EXAMPLES, OURS, changed, reconfigured, target_of
from golden import Case, cases, name_of
from safetensors.torch import load_file, save_file
from written import DFLASH, random_head

from drafthead.core.errors import UserError
from drafthead.heads.base import HEADS
from drafthead.heads.formats import FORMATS, load_head, read_foreign
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.formats.exporting import export_head
from drafthead.heads.formats.keys import Keys

Change = Callable[[dict[str, Any]], None]
LAYERS = "transformer_layer_config"


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of an example, in a folder of its own."""

    def copy(name: str) -> Path:
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        for file in (whole / name).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    return copy


def read(folder: Path, whole: Path) -> Any:
    """The configuration of the head in a folder."""
    return read_foreign(folder, TargetFacts.of(target_of(whole)))[1].config


@pytest.mark.parametrize("name", [*(example.name for example in EXAMPLES), OURS])
def test_a_key_that_nobody_reads_is_refused_by_name(name, copied, whole) -> None:
    folder = copied(name)
    reconfigured(folder, lambda config: config.update(residual_multiplier=0.5, also_unknown=None))
    with pytest.raises(UserError, match=r"residual_multiplier is 0.5, .* delete it from the file"):
        load_head(folder, target_of(whole))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("speculators dflash", (LAYERS,)),
        ("speculators dflash", (LAYERS, "rope_parameters")),
        ("speculators eagle3", ("speculators_config",)),
        ("speculators eagle3", ("speculators_config", "verifier")),
        ("dflash", ("dflash_config",)),
        ("eagle3-sglang", ("eagle_config",)),
        ("eagle", ("rope_parameters",)),
        (OURS, ("features",)),
        (OURS, ("head", "rope_parameters")),
    ],
)
def test_keys_of_nested_objects_are_accounted_for(name, place, copied, whole) -> None:
    folder = copied(name)

    def change(config: dict[str, Any]) -> None:
        for key in place:
            config = config[key]
        config["strength"] = 2

    reconfigured(folder, change)
    with pytest.raises(UserError, match=r"\.".join([*place, "strength"]) + " is 2"):
        read(folder, whole)


def test_all_unknown_keys_are_named_at_once(copied, whole) -> None:
    folder = copied("speculators dflash")

    def change(config: dict[str, Any]) -> None:
        config["speculators_config"]["proposal_methods"][0]["gamma"] = 1
        config["gamma"] = {"a": 1}

    reconfigured(folder, change)
    with pytest.raises(UserError, match=r"proposal_methods\.gamma is 1, .*nor are gamma; if"):
        read(folder, whole)


def test_in_a_merged_model_the_rest_is_the_targets(copied, whole) -> None:
    """Its configuration is that of a model, of any kind; only Medusa's own keys are the head's."""
    folder = copied("medusa v2")
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    (folder / "medusa_lm_head.safetensors").unlink()
    merged = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    save_file(merged, folder / "model.safetensors")
    content = {"architectures": ["MedusaModelLlama"], "residual_multiplier": 0.5}
    (folder / "config.json").write_text(json.dumps(content))
    known, _ = read_foreign(folder, TargetFacts.of(target_of(whole)))
    assert known.name == "medusa-merged"
    (folder / "config.json").write_text(json.dumps({**content, "medusa_scale": 2}))
    with pytest.raises(UserError, match="medusa_scale is 2"):
        read(folder, whole)


def classes_below(cls: type[Keys]) -> set[type[Keys]]:
    return {cls}.union(*(classes_below(child) for child in cls.__subclasses__()))


def test_no_key_is_both_read_and_neutral() -> None:
    """But `provenance`, of which any content is allowed."""
    assert FORMATS  # all readers are there
    for cls in classes_below(Keys):
        names = " ".join(cls.neutral.values()).split()
        assert not set(names) & set(cls.model_fields) - {"provenance"}, cls
        assert all(reason for reason in cls.neutral)


@pytest.mark.parametrize("case", cases("*/*"), ids=name_of)
def test_what_the_official_projects_write_is_all_known(case: Case) -> None:
    if (case.path / "config.json").exists():
        _, foreign = read_foreign(case.path, TargetFacts.of(case.target))
        assert foreign.family in HEADS


# DFlash: keys that change what slots see and what they predict


def nested(**keys: Any) -> Change:
    return lambda config: config["dflash_config"].update(keys)


def without_causality(change: Change) -> Change:
    """A change of a configuration that says nothing about causality, as most published ones."""

    def both(config: dict[str, Any]) -> None:
        del config["is_causal"], config["dflash_config"]["causal"]
        change(config)

    return both


WINDOW = {"sliding_window": 9, "use_sliding_window": True}
SLIDING = {"layer_types": ["sliding_attention"] * 2, **WINDOW}


@pytest.mark.parametrize(
    ("change", "causal", "window", "root"),
    [
        (nested(), False, 0, False),
        (nested(causal=True), True, 0, False),
        (nested(causal_head=True), True, 0, False),
        (nested(causal_head=False, causal=False), False, 0, False),
        (lambda config: config.update(is_causal=True), True, 0, False),
        (lambda config: config.update(causal=True), True, 0, False),
        (nested(sample_from_anchor=True), False, 0, True),
        (nested(shift_label=True), False, 0, True),
        (nested(shift_label=False), False, 0, False),
        (nested(use_swa=True, swa_window_size=7), False, 7, False),
        (lambda config: (nested(use_swa=True)(config), config.update(WINDOW)), False, 9, False),
        (nested(use_swa=False, swa_window_size=7), False, 0, False),
        (lambda config: config.update(SLIDING), True, 9, False),
        (lambda config: config.update(SLIDING, is_causal=False), False, 9, False),
        (lambda config: config.update({**SLIDING, "sliding_window": 10**6}), True, 0, False),
        (
            lambda config: (
                config.pop("layer_types"), config.update({**WINDOW, "max_window_layers": 0})
            ),
            True, 9, False,
        ),
        (
            lambda config: (
                config.pop("layer_types"), config.update({**WINDOW, "max_window_layers": 2})
            ),
            False, 0, False,
        ),
    ],
)  # fmt: skip
def test_what_slots_see_and_predict_is_read(change, causal, window, root, copied, whole) -> None:
    folder = copied("dflash")
    reconfigured(folder, without_causality(change))
    config = read(folder, whole)
    assert (config.causal, config.window, config.root_predicts) == (causal, window, root)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (nested(causal=True, causal_head=False), "causal is True but causal_head is False"),
        (lambda c: c.update(is_causal=True, causal=False), "causal is False but is_causal is True"),
        (nested(sample_from_anchor=True, shift_label=False), "sample_from_anchor is True but"),
        (lambda c: c.update(mask_token_id=3), "mask_token_id is 3, but dflash_config.mask"),
        (nested(use_swa=True), "a window of 0, which is shorter"),
        (lambda c: c.update(max_window_layers=1, layer_types=None, **WINDOW), "all or none"),
        (nested(attention_sink_bias=True), "attention_sink_bias is True: our draft layers cannot"),
        (nested(attention_value_scale=0.7), "attention_value_scale is 0.7"),
        (nested(projector_type="domino"), "is 'domino': our heads lack Domino's correction"),
        (nested(conv_kernel_size=2), "conv_kernel_size is 2: our heads lack DFlash2's"),
        (nested(final_logit_softcapping=30.0), "final_logit_softcapping is 30.0"),
        (nested(output_multiplier=0.5), "output_multiplier is 0.5"),
        (nested(use_aux_hidden_state=False), "use_aux_hidden_state is False: our heads read"),
        (lambda c: c.update(target_hidden_size=64), "target_hidden_size 64, but the tensors have"),
        (lambda c: c.update(rope_is_neox_style=False), "rope_is_neox_style is False"),
        (lambda c: c.update(model_type="gemma"), "model_type is 'gemma': how its layers differ"),
    ],
)  # fmt: skip
def test_what_our_heads_do_not_compute_is_refused_by_name(change, complaint, copied, whole) -> None:
    folder = copied("dflash")
    reconfigured(folder, without_causality(change))
    with pytest.raises(UserError, match=complaint):
        load_head(folder, target_of(whole))


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        ("prefix_gru.weight_ih_l0", "Domino's correction"),
        ("layers.0.attention_conv.base_kernel", "DFlash2's convolutions"),
        ("candidate_selector.predecessor_codebook", "DFlash2's convolutions"),
        ("hidden_dim_adapter.weight", "features of their own width"),
        ("layers.0.self_attn.attention_sink_bias", "our draft layers cannot compute"),
    ],
)
def test_parts_of_other_heads_are_refused_by_what_they_are(part, complaint, copied, whole) -> None:
    folder = copied("dflash")
    changed(folder, lambda tensors: tensors.update({part: tensors["norm.weight"].clone()}))
    with pytest.raises(UserError, match=complaint):
        load_head(folder, target_of(whole))


@pytest.mark.parametrize("kind", ["dflash2", "xpress", "mtp"])
def test_other_kinds_of_speculators_are_refused(kind, copied, whole) -> None:
    folder = copied("speculators dflash")
    reconfigured(folder, lambda config: config.update(speculators_model_type=kind))
    with pytest.raises(UserError, match=f"is '{kind}': heads of this kind are not read"):
        load_head(folder, target_of(whole))


def test_a_vector_for_the_mask_token_in_another_file_is_not_forgotten(copied, whole) -> None:
    folder = copied("dflash")
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UserError, match="mask_embedding.pt holds a vector for the mask token"):
        load_head(folder, target_of(whole))


DEFAULT, OTHER = ({"rope_type": "default", "rope_theta": theta} for theta in (1e4, 5e5))


@pytest.mark.parametrize(
    ("slides", "rope", "found"),
    [
        (False, {"full_attention": OTHER, "sliding_attention": DEFAULT}, 5e5),
        (True, {"full_attention": DEFAULT, "sliding_attention": OTHER}, 5e5),
        (False, {"sliding_attention": OTHER}, r"rope_parameters.full_attention is missing"),
        (False, {"full_attention": OTHER, "rope_theta": 2.0}, r"rope_parameters.rope_theta is 2.0"),
        (False, {"full_attention": OTHER, "sliding_attention": {"x": 1}}, "attention.x is 1"),
    ],
)
def test_rotary_parameters_are_those_of_the_kind_of_layer(slides, rope, found, copied, whole):
    folder = copied("dflash")

    def change(config: dict[str, Any]) -> None:
        del config["rope_theta"]
        config.update({**(SLIDING if slides else {}), "rope_parameters": rope})

    reconfigured(folder, change)
    if isinstance(found, float):
        assert read(folder, whole).rope_parameters["rope_theta"] == found
        return
    with pytest.raises(UserError, match=found):
        read(folder, whole)


# speculators: causality follows from the window, and vLLM 0.33 reads it differently


def vllm_makes_causal(config: dict[str, Any]) -> bool:
    """What vLLM 0.33 makes of every layer: its rule for `dflash_config.causal`."""
    return not config["sliding_window_non_causal"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 9])
def test_vllm_takes_an_export_for_as_causal_as_it_is(causal, window, whole, tmp_path) -> None:
    target = target_of(whole)
    head = random_head("parallel", target, {**DFLASH, "causal": causal, "window": window})
    export_head(head, TargetFacts.of(target), target, "speculators", tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert vllm_makes_causal(config) == causal
    again = read(tmp_path / "head", whole)
    assert (again.causal, again.window) == (causal, window)


@pytest.mark.parametrize(
    ("kinds", "non_causal", "causal", "window"),
    [
        ("full_attention", False, False, 0),  # as speculators 0.9 reads it
        ("full_attention", True, False, 0),
        ("sliding_attention", False, True, 9),
        ("sliding_attention", True, False, 9),
    ],
)
def test_sliding_layers_of_speculators_are_causal(
    kinds, non_causal, causal, window, copied, whole
) -> None:
    folder = copied("speculators dflash")

    def change(config: dict[str, Any]) -> None:
        config["sliding_window_non_causal"] = non_causal
        config[LAYERS].update(layer_types=[kinds] * 2, sliding_window=9)

    reconfigured(folder, change)
    found = read(folder, whole)
    assert (found.causal, found.window) == (causal, window)


def test_the_window_of_an_eagle_head_is_read_as_speculators_writes_it(copied, whole) -> None:
    folder = copied("speculators eagle3")
    reconfigured(folder, lambda c: c[LAYERS].update(layer_types=["sliding_attention"], **WINDOW))
    assert read(folder, whole).window == 9
    reconfigured(folder, lambda c: c[LAYERS].update(sliding_window=10**6))
    assert read(folder, whole).window == 0  # longer than the context
    reconfigured(folder, lambda c: c[LAYERS].update(sliding_window=None))
    with pytest.raises(UserError, match="by a window with a size"):
        load_head(folder, target_of(whole))
