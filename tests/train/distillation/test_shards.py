"""Shards: all of them are the rows of one process, whatever kills them; others are not read."""

from dataclasses import replace
from pathlib import Path

import pytest
from distilled import SETTINGS, RoundedByBatch, SomeCut, asked, distilled
from tiny import tiny_llama

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.train.data.row_sources import rows_of, shards_of, source_digest
from drafthead.train.distillation.distilled_file import DistilledFile, Shard
from drafthead.train.jobs.outputs import manifest_path

BATCHES = replace(SETTINGS, batch_size=3)


pytestmark = pytest.mark.usefixtures("one_batch_in_a_window")


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """What one process writes, whose answers depend on their batches."""
    path = tmp_path / "one" / "whole.jsonl"
    distilled(RoundedByBatch(), asked(20), path, BATCHES)
    return path


def distil_shards(output: Path, count: int) -> list[Path]:
    """Write all shards."""
    shards = [Shard(number, count) for number in range(1, count + 1)]
    for shard in shards:
        distilled(RoundedByBatch(), asked(20), output, BATCHES, shard=shard)
    return [shard.path(output) for shard in shards]


def rows_by_id(source: Path) -> dict[str, dict]:
    """The rows of a source, in any order."""
    return {row.values["id"]: row.values for row in rows_of(str(source))}


@pytest.mark.parametrize("count", [1, 2, 3, 7, 9])
def test_shards_are_read_as_the_rows_of_one_process(output: Path, whole: Path, count: int) -> None:
    """Nine shards of seven windows: some have nothing to do."""
    paths = distil_shards(output, count)
    assert not output.exists() and shards_of(output) == paths
    assert rows_by_id(output) == rows_by_id(whole) and len(rows_by_id(output)) == 20


def test_the_digest_of_shards_is_that_of_their_rows(output: Path) -> None:
    first = distil_shards(output, 2)[0]
    before = source_digest(str(output))
    assert source_digest(str(output)) == before
    first.write_bytes(first.read_bytes()[:-2] + b" }")
    assert source_digest(str(output)) != before


def test_cut_answers_are_dropped_of_shards_too(output: Path, tmp_path: Path) -> None:
    settings = replace(BATCHES, drop_cut=True, max_new_tokens=8)
    one = tmp_path / "one" / "whole.jsonl"
    prompts = asked(9)
    distilled(SomeCut(), prompts, one, settings)
    for number in (1, 2):
        distilled(SomeCut(), prompts, output, settings, shard=Shard(number, 2))
    assert rows_by_id(output) == rows_by_id(one) and len(rows_by_id(one)) == 4


def test_missing_shards_are_named(output: Path) -> None:
    for path in distil_shards(output, 4)[1::2]:
        path.unlink()
    with pytest.raises(UserError, match="missing: answers.2-of-4.jsonl, answers.4-of-4.jsonl"):
        shards_of(output)


def test_without_shards_there_are_none(output: Path) -> None:
    assert shards_of(output) == [] == shards_of(output.parent / "nowhere" / "answers.jsonl")
    with pytest.raises(UserError, match=r"answers.jsonl does not exist"):
        list(rows_of(str(output)))


def test_shards_of_two_splits_are_refused(output: Path) -> None:
    distil_shards(output, 2)
    distilled(RoundedByBatch(), asked(20), output, BATCHES, shard=Shard(1, 3))
    with pytest.raises(UserError, match="shards of 2 and of 3 parts"):
        shards_of(output)


def test_a_shard_that_was_killed_is_not_read(output: Path, monkeypatch) -> None:
    second = distil_shards(output, 2)[1]
    second.write_bytes(second.read_bytes()[:-10])
    monkeypatch.setattr(DistilledFile, "append", stopped)
    with pytest.raises(KeyboardInterrupt):
        distilled(RoundedByBatch(), asked(20), output, BATCHES, shard=Shard(2, 2))
    with pytest.raises(UserError, match=r"answers.2-of-2.jsonl is not complete"):
        shards_of(output)


def stopped(*_: object) -> None:
    """What a signal does."""
    raise KeyboardInterrupt


def test_rows_that_a_user_takes_out_of_a_shard_stay_out(output: Path) -> None:
    first = distil_shards(output, 2)[0]
    lines = first.read_bytes().splitlines(keepends=True)
    first.write_bytes(b"".join(lines[:1] + lines[2:]))
    distilled(RoundedByBatch(), asked(20), output, BATCHES, shard=Shard(1, 2))
    assert len(rows_by_id(output)) == 19


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"settings": replace(BATCHES, seed=3)}, "with seed 0, .*2-of-2.jsonl with 3"),
        ({"settings": replace(BATCHES, system="s")}, "with system None, .*2-of-2.jsonl with .s."),
        ({"prompts": asked(19)}, "1-of-2.jsonl was written with plan .*digest"),
        ({"decoder": RoundedByBatch(target=Target(tiny_llama(seed=1)))}, "with weights"),
    ],
)
def test_shards_of_other_distillations_are_refused(
    output: Path, change: dict, sentence: str
) -> None:
    distil_shards(output, 2)
    options = {"decoder": RoundedByBatch(), "prompts": asked(20), "settings": BATCHES} | change
    distilled(**options, output=output, overwrite=True, shard=Shard(2, 2))
    with pytest.raises(UserError, match=sentence):
        shards_of(output)


def test_a_renamed_shard_is_refused(output: Path) -> None:
    first, second = distil_shards(output, 2)
    for path in (manifest_path, Path):
        path(second).write_bytes(path(first).read_bytes())
    with pytest.raises(UserError, match="2-of-2.jsonl was written as shard 1/2, not 2/2"):
        shards_of(output)


def test_a_shard_without_its_manifest_is_refused(output: Path) -> None:
    manifest_path(distil_shards(output, 2)[1]).unlink()
    with pytest.raises(UserError, match=r"2-of-2.jsonl exists without .*copy it from where"):
        shards_of(output)


def test_a_file_goes_before_its_shards(output: Path) -> None:
    distil_shards(output, 2)
    output.write_text('{"id": "mine"}\n')
    assert rows_by_id(output).keys() == {"mine"}


def test_other_prompts_are_refused_for_a_shard_that_was_begun(output: Path) -> None:
    distil_shards(output, 2)
    with pytest.raises(UserError, match="the prompts are no longer those that .*1-of-2"):
        distilled(RoundedByBatch(), asked(21), output, BATCHES, shard=Shard(1, 2))


@pytest.mark.parametrize("wrong", ["", "2", "0/2", "3/2", "1/0", "a/b", "1/2/3", "-1/2"])
def test_shards_without_meaning_are_refused(wrong: str) -> None:
    with pytest.raises(UserError, match="the first of four 1/4"):
        Shard.parse(wrong)


def test_two_shards_can_be_written_at_once(output: Path) -> None:
    with DistilledFile(Shard(1, 2).path(output), BATCHES, shard=Shard(1, 2)):
        distilled(RoundedByBatch(), asked(20), output, BATCHES, shard=Shard(2, 2))
        assert Shard(2, 2).path(output).read_bytes().count(b"\n") > 0
