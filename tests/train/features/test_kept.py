"""Features that are kept on disk: the same losses without the target's passes."""

from pathlib import Path

import pytest
import torch
from tiny import write_conversations, write_target

from drafthead.heads.errors import UserError
from drafthead.heads.target.features import Features, FeatureSpec
from drafthead.heads.target.target import Target
from drafthead.train.data.packing import DataConfig, PackedData, load_packed
from drafthead.train.features import kept as kept_features
from drafthead.train.features.kept import FeatureSource, KeptFeatures
from drafthead.train.features.reading import FeatureReader

SOURCE = FeatureSource(target="a", rows="b", dtype="torch.float32", mixed_precision="no")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, max_position_embeddings=128, initializer_range=0.02)
    return Target.from_pretrained(folder, "float32", "cpu")


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


def test_features_of_something_else_are_refused(tmp_path: Path):
    KeptFeatures(tmp_path, SOURCE, FeatureSpec())
    other = FeatureSource(target="a", rows="c", dtype="torch.float32", mixed_precision="no")
    with pytest.raises(UserError, match="features of other rows .*data.feature_folder"):
        KeptFeatures(tmp_path, other, FeatureSpec())


def test_a_disk_without_room_is_said_before_training(tmp_path: Path, monkeypatch):
    kept = KeptFeatures(tmp_path, SOURCE, FeatureSpec())
    kept.check_space(num_rows=10, row_bytes=100)
    with pytest.raises(UserError, match=r"of 10 rows need .*GiB.*data.feature_folder"):
        kept.check_space(num_rows=10, row_bytes=2**50)
