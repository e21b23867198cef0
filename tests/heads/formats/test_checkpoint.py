"""A head on disk: it comes back as it was, and damage gives one clear sentence."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafthead.core.errors import UserError
from drafthead.core.target.weights_hash import weights_fingerprint
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.formats.drafthead import save_head
from drafthead.heads.formats.exporting import export_head
from drafthead.heads.formats.loading import load_head


@pytest.fixture
def saved(tmp_path, target, make_head, family) -> Path:
    """A saved head of each family."""
    head = make_head(family, target)
    head.path_counts = {(0,): 9, (1,): 4, (0, 0): 3}
    save_head(head, tmp_path / "head", target, "some/target", {"note": 1}, torch.float32)
    return tmp_path / "head"


def test_a_head_comes_back_as_it_was(saved, target, make_head, family) -> None:
    original, loaded = make_head(family, target), load_head(saved, target)
    assert loaded.config == original.config
    for (name, tensor), (_, other) in zip(
        original.state_dict().items(), loaded.state_dict().items(), strict=True
    ):
        assert torch.equal(tensor, other), name
    assert loaded.path_counts == {(0,): 9, (1,): 4, (0, 0): 3}
    description = json.loads((saved / "config.json").read_text())
    assert description["features"]["layer_convention"] == "output of layer"
    assert description["target"]["name"] == "some/target"
    assert not list(saved.glob("*.tmp"))


def test_whoever_may_read_new_files_may_read_a_head(target, make_head, tmp_path) -> None:
    (new := tmp_path / "new").touch()
    head = make_head("medusa", target)
    save_head(head, tmp_path / "ours", target, "some/target", {})
    export_head(head, TargetFacts.of(target), target, "vllm-medusa", tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        modes = {file.name: file.stat().st_mode for file in (tmp_path / folder).iterdir()}
        assert set(modes.values()) == {new.stat().st_mode}, modes


def test_a_missing_folder_is_named(target, tmp_path, family) -> None:
    with pytest.raises(UserError, match="nowhere.*does not exist"):
        load_head(tmp_path / "nowhere", target)


def test_truncated_weights_are_refused(saved, target) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged or truncated"):
        load_head(saved, target)


def test_missing_weights_are_refused(saved, target) -> None:
    (saved / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors does not exist"):
        load_head(saved, target)


def test_a_head_for_another_width_or_vocabulary_is_refused(saved, make_target) -> None:
    with pytest.raises(UserError, match="hidden_size 32.*hidden_size 16"):
        load_head(saved, make_target(hidden=16))
    with pytest.raises(UserError, match="vocab_size 64.*vocab_size 70"):
        load_head(saved, make_target(vocab=70))


def test_a_head_of_other_weights_is_taken_and_named(make_head, make_target, tmp_path, caplog):
    target, other = make_target(seed=0), make_target(seed=1)
    own = {"target_weights": weights_fingerprint(target)}
    save_head(make_head("medusa", target), tmp_path / "head", target, "some/target", own)
    load_head(tmp_path / "head", target)
    assert not caplog.messages
    load_head(tmp_path / "head", other)
    assert caplog.messages == [
        f"{tmp_path / 'head'} was trained for some/target, and this target has other weights: "
        "acceptance may be low; `drafthead build --target MODEL --init-from "
        f"{tmp_path / 'head'} --output DIR --minutes 30` adapts it"
    ]


def damage(folder: Path, kind: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    first = sorted(tensors)[0]
    if kind == "lacks":
        del tensors[first]
    elif kind == "unknown":
        tensors["extra"] = torch.zeros(1)
    elif kind == "shape":
        tensors[first] = torch.zeros(2, 3, 4)
    else:
        tensors[first] = torch.full_like(tensors[first], torch.nan)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [("lacks", "lacks 1"), ("unknown", "unknown"), ("shape", "shape"), ("nan", "not finite")],
)
def test_wrong_tensors_are_refused(saved, target, kind, complaint) -> None:
    damage(saved, kind)
    with pytest.raises(UserError, match=complaint):
        load_head(saved, target)


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("family", "medusaa", "unknown head family"),
        ("head", {"depthh": 3}, "depthh"),
        ("head", 3, "head is 3, but must be an object"),
    ],
)
def test_a_wrong_configuration_is_refused(saved, target, key, value, complaint) -> None:
    path = saved / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(UserError, match=complaint):
        load_head(saved, target)


def test_broken_json_is_refused(saved, target) -> None:
    (saved / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_head(saved, target)
