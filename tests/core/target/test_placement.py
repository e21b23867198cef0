"""Layers of a target that are elsewhere: the same states, and refusals with the reason."""

import json
from pathlib import Path

import pytest
import torch
from tiny import tiny_llama, write_target

from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.placement import Placement, whole_weight
from drafthead.core.target.target import Target
from drafthead.core.target.weight_types import LOSSY
from drafthead.infer import Decoder

LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    write_target(path, num_hidden_layers=LAYERS)
    return path


def placed(folder: Path, placement: Placement) -> Target:
    return load_decoder_only(folder, "float32", "cpu", placement=placement)


def on_disk(target: Target) -> list[bool]:
    """Of each layer, whether its weights are on disk."""
    layers = target.layers.children()
    return [any(weight.is_meta for weight in layer.parameters()) for layer in layers]


def test_a_map_names_layers_and_the_rest_stays(folder: Path) -> None:
    one = placed(folder, Placement({"model.layers.1": "disk"}))
    assert on_disk(one) == [False, True, False]
    all_but_one = placed(folder, Placement({"model.layers": "disk", "model.layers.2": "cpu"}))
    assert on_disk(all_but_one) == [True, True, False]
    assert one.device == all_but_one.device == torch.device("cpu")


@pytest.mark.parametrize(("layers_in_memory", "expected"), [(0, 3), (1, 2), (9, 0)])
def test_auto_uses_the_memory_that_it_is_given(
    folder: Path, layers_in_memory: int, expected: int
) -> None:
    """A layer that is read from disk needs room beside those in memory."""
    model = tiny_llama(vocab_size=260, num_hidden_layers=LAYERS, num_attention_heads=2)
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers]
    around = sum(p.nbytes for p in model.parameters()) - sum(sizes)
    memory = around + 1000 + (layers_in_memory + 1) * sizes[0]
    target = placed(folder, Placement("auto", memory={"cpu": memory}))
    assert sum(on_disk(target)) == expected


def test_auto_without_a_limit_leaves_a_small_target_whole(folder: Path) -> None:
    assert not any(on_disk(placed(folder, Placement("auto"))))


def test_answers_of_layers_on_disk_are_those_of_layers_in_memory(folder: Path) -> None:
    prompts = [[5, 6, 7, 5, 6], [9, 10]]
    placements = Placement(), Placement({"model.layers.1": "disk"})
    whole, elsewhere = (
        Decoder.from_pretrained(placed(folder, placement), draft="lookup")
        for placement in placements
    )
    answers = whole.generate(prompts, max_new_tokens=12).sequences
    assert elsewhere.generate(prompts, max_new_tokens=12).sequences == answers
    with pytest.raises(UserError, match="compile is for targets whose layers are all on one"):
        placed(folder, placements[1]).check_compilable()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of mapped files")
def test_weights_in_their_stored_type_stay_in_their_file(folder: Path) -> None:
    """So that all processes of a machine share their memory: nothing copies what it maps."""
    target = load_decoder_only(folder, "auto", "cpu")
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if str(folder) in line]
    mapped = [range(int(first, 16), int(last, 16)) for first, last in ranges]
    for name, weight in target.model.named_parameters():
        assert any(weight.data_ptr() in part for part in mapped), name


def test_weights_on_disk_can_be_read(folder: Path) -> None:
    whole, elsewhere = placed(folder, Placement()), placed(folder, Placement("disk"))
    found = elsewhere.model.state_dict()
    for name, weight in whole.model.state_dict().items():
        assert whole_weight(elsewhere.model, name, found[name]).equal(weight)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (Placement({"lm_head": "disk"}), "'lm_head', which is not a decoder layer: .*layers.0 to"),
        (Placement({"model.layers.9": "cpu"}), "'model.layers.9', which is not a decoder layer"),
        (Placement({"model.layers.0": 7}), "its placement names the device 7, and this machine"),
        (Placement({"model.layers.0": "tape"}), "the device 'tape', and this machine has"),
        (Placement("tape"), "the device 'tape', and this machine has"),
        (Placement("auto", memory={7: "1GB"}), "its memory names the device 7"),
        (Placement("auto", memory={"cpu": "much"}), "memory cannot be read: .*much"),
    ],
)
def test_what_cannot_be_placed_is_named(folder: Path, placement: Placement, words: str) -> None:
    with pytest.raises(UserError, match=words):
        placed(folder, placement)


@pytest.mark.parametrize("dtype", LOSSY)
def test_rounded_targets_are_not_placed(folder: Path, dtype: str) -> None:
    with pytest.raises(UserError, match=f"type {dtype} cannot be placed"):
        load_decoder_only(folder, dtype, "cpu", placement=Placement("disk"))


def test_stored_quantised_targets_are_not_placed(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    quantised = {**config, "quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(UserError, match="is quantised, and layers of such targets cannot be"):
        placed(tmp_path, Placement("disk"))


def test_files_that_are_not_safetensors_need_a_folder(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    whole = placed(folder, Placement())
    torch.save(whole.model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot load the model .*offload_folder"):
        placed(tmp_path, Placement("disk"))
    elsewhere = placed(tmp_path, Placement("disk", offload_folder=str(tmp_path / "off")))
    assert all(on_disk(elsewhere))
