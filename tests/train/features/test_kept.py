"""Features that are kept on disk: the same losses without the target's passes."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from tiny import tiny_llama, write_conversations, write_target

from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.features import Features, FeatureSpec
from drafthead.core.target.target import Target
from drafthead.core.target.weights_hash import weights_fingerprint
from drafthead.train.data.packing import PackedData
from drafthead.train.data.training_rows import load_packed
from drafthead.train.features import kept as kept_features
from drafthead.train.features.kept import (
    FeatureSource,
    KeptFeatures,
    digest_of_settings,
    feature_bytes,
)
from drafthead.train.features.reading import FeatureReader
from drafthead.train.settings import DataConfig

SOURCE = FeatureSource(
    target="a", settings="s", rows="b", dtype="torch.float32", mixed_precision="no"
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, max_position_embeddings=128, initializer_range=0.02)
    return load_decoder_only(folder, "float32", "cpu")


@pytest.fixture(scope="module")
def data(target: Target, tmp_path_factory: pytest.TempPathFactory) -> PackedData:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    write_conversations(path, 12, seed=0)
    return load_packed(
        {str(path): 1.0}, target.tokenizer, DataConfig(str(path), max_length=64), seed=0
    )


@pytest.fixture
def passes(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each pass of the target: its rows."""
    counted: list[int] = []
    read = target.read

    def reading(input_ids: torch.Tensor, *rest: object) -> Features:
        counted.append(len(input_ids))
        return read(input_ids, *rest)

    monkeypatch.setattr(target, "read", reading)
    return counted


def reader(target: Target, data: PackedData, folder: Path, *layers: int) -> FeatureReader:
    spec = FeatureSpec(layers)
    return FeatureReader(target, data, spec, "no", KeptFeatures(folder, SOURCE, spec))


def read_through(reader: FeatureReader) -> list[list[torch.Tensor]]:
    """The tensors of all batches of two rows, without their padding."""
    found = []
    for first in range(0, len(reader.data.rows) - 1, 2):
        batch = reader.batch([first, first + 1])
        real = batch.segments > 0
        states = [*batch.features.taps, batch.features.last]
        found.append([batch.input_ids[real], *(hidden[real] for hidden in states)])
    return found


def same(some: list[list[torch.Tensor]], others: list[list[torch.Tensor]]) -> bool:
    ours, theirs = ([tensor for batch in all_of for tensor in batch] for all_of in (some, others))
    return all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


def test_a_second_epoch_reads_what_the_first_has_written(target, data, passes, tmp_path: Path):
    first = read_through(reader(target, data, tmp_path, 0, 2))
    done = len(passes)
    assert done > 1
    assert same(read_through(reader(target, data, tmp_path, 0, 2)), first)
    assert len(passes) == done


def test_rows_are_kept_one_by_one_whatever_batch_they_came_in(target, data, passes, tmp_path: Path):
    keeping = reader(target, data, tmp_path, 1)
    together, done = keeping.batch([0, 1]), len(passes)
    alone = keeping.batch([1])
    length = data.row_length(1)
    assert alone.features.last[0].equal(together.features.last[1, :length])
    assert len(passes) == done


def test_another_heads_layers_are_added(target, data, passes, tmp_path: Path):
    read_through(reader(target, data, tmp_path, 0))
    read_through(reader(target, data, tmp_path, 2))
    done = len(passes)
    both = read_through(reader(target, data, tmp_path, 2, 0))
    assert len(passes) == done
    online = FeatureReader(target, data, FeatureSpec((2, 0)), "no")
    assert same(read_through(online), both)


@pytest.mark.parametrize("bytes_left", [0, 5, 2000])
def test_a_damaged_file_is_written_again(target, data, passes, tmp_path: Path, bytes_left: int):
    keeping = reader(target, data, tmp_path, 0)
    whole = keeping.batch([0]).features.last
    path = keeping.kept.path(0)
    path.write_bytes(path.read_bytes()[:bytes_left])
    assert keeping.batch([0]).features.last.equal(whole)
    assert passes == [1, 1]
    keeping.batch([0])
    assert passes == [1, 1]


def test_a_write_that_fails_leaves_nothing(target, data, tmp_path: Path, monkeypatch):
    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_features, "save_file", full)
    keeping = reader(target, data, tmp_path, 0)
    with pytest.raises(OSError, match="No space"):
        keeping.batch([0])
    assert list(keeping.kept.path(0).parent.iterdir()) == []


@pytest.mark.parametrize("name", [field.name for field in fields(FeatureSource)])
def test_features_of_something_else_are_refused(tmp_path: Path, name: str):
    KeptFeatures(tmp_path, SOURCE, FeatureSpec())
    with pytest.raises(UserError, match=f"features of other {name} .*data.feature_folder"):
        KeptFeatures(tmp_path, replace(SOURCE, **{name: "another"}), FeatureSpec())


def test_the_same_weights_under_another_configuration_are_another_source():
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    targets = [Target(tiny_llama()), Target(tiny_llama(rope_parameters=rope))]
    assert len({weights_fingerprint(target) for target in targets}) == 1
    assert len({digest_of_settings(target) for target in targets}) == 2
    assert digest_of_settings(Target(tiny_llama(seed=1))) == digest_of_settings(targets[0])


def test_a_disk_without_room_is_said_before_training(tmp_path: Path):
    kept = KeptFeatures(tmp_path, SOURCE, FeatureSpec())
    kept.reserve([100] * 10)
    with pytest.raises(UserError, match=r"of 10 rows need .* GB .*data.feature_folder"):
        kept.reserve([2**50] * 10)


def test_the_disk_that_is_said_to_be_needed_is_needed(target, data, tmp_path: Path):
    keeping = reader(target, data, tmp_path, 0, 1, 2)
    read_through(keeping)
    files = [path for path in tmp_path.rglob("*.safetensors")]
    positions = sum(data.row_length(int(path.stem.removeprefix("row-"))) for path in files)
    said = positions * feature_bytes(keeping.kept.spec, target.hidden_size, target.dtype)
    headers = 400 * len(files)
    assert said < sum(path.stat().st_size for path in files) < said + headers


def test_what_does_not_fit_into_the_budget_is_computed_in_every_epoch(
    target, data, passes, tmp_path: Path, caplog
):
    keeping = reader(target, data, tmp_path, 0)
    sizes = [2 * 4 * target.hidden_size * data.row_length(row) for row in range(len(data.rows))]
    with caplog.at_level("INFO", "drafthead"):
        keeping.kept.reserve(sizes, budget_gb=(sum(sizes[:3]) + 1) / 1e9)
    assert f"features of 3 of {len(sizes)} rows are kept" in caplog.text
    first = read_through(keeping)
    kept = sorted(int(path.stem.removeprefix("row-")) for path in tmp_path.rglob("*.safetensors"))
    assert kept == [0, 1, 2]
    passes.clear()
    assert same(read_through(keeping), first)
    # Of the batches (0, 1), (2, 3), (4, 5) ... the first needs no pass, the second one row.
    assert passes == [1, *[2] * (len(sizes) // 2 - 2)]
    online = read_through(FeatureReader(target, data, FeatureSpec((0,)), "no"))
    for ours, theirs in zip(first, online, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_budget_without_room_for_a_row_is_refused(tmp_path: Path):
    kept = KeptFeatures(tmp_path, SOURCE, FeatureSpec())
    with pytest.raises(UserError, match="feature_budget_gb=1e-07 has no room for a row of 1e-06"):
        kept.reserve([1000] * 10, budget_gb=1e-7)


def test_a_budget_needs_a_folder():
    with pytest.raises(ValueError, match="needs a feature_folder"):
        DataConfig("a.jsonl", feature_budget_gb=1.0)


def test_a_budget_must_be_above_nothing():
    with pytest.raises(ValueError, match="feature_budget_gb must be above 0, got -1"):
        DataConfig("a.jsonl", feature_folder="f", feature_budget_gb=-1)
