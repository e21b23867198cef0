"""Shards: they join to the file of one process, whatever kills them, and nothing else does."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from distilled import SETTINGS, FakeDecoder, RoundedByBatch, asked, distilled
from tiny import tiny_llama

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.train.distillation.distilled_file import DistilledFile, Shard
from drafthead.train.distillation.merging import merge
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


@pytest.mark.parametrize("count", [1, 2, 3, 7, 9])
def test_shards_join_to_the_bytes_of_one_process(output: Path, whole: Path, count: int) -> None:
    """Nine shards of seven windows: some have nothing to do."""
    distil_shards(output, count)
    report = merge(output)
    assert output.read_bytes() == whole.read_bytes()
    assert json.loads(manifest_path(output).read_text()) == json.loads(
        manifest_path(whole).read_text()
    )
    assert (report.shards, report.statistics.rows) == (count, 20)


def test_a_joined_file_is_continued_by_one_process(output: Path, whole: Path) -> None:
    distil_shards(output, 2)
    merge(output)
    for path in (output, whole):
        distilled(RoundedByBatch(), asked(25), path, BATCHES)
    assert output.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("kept", [0, 1, 200, 1500, 2900])
def test_a_killed_shard_resumes_alone(output: Path, whole: Path, kept: int) -> None:
    second = distil_shards(output, 2)[1]
    second.write_bytes(second.read_bytes()[:kept])
    distilled(RoundedByBatch(), asked(20), output, BATCHES, shard=Shard(2, 2))
    merge(output)
    assert output.read_bytes() == whole.read_bytes()


def test_cut_answers_that_were_dropped_are_dropped_in_the_joined_file(
    output: Path, tmp_path: Path
) -> None:
    settings = replace(BATCHES, drop_cut=True, max_new_tokens=8)
    one = tmp_path / "one" / "whole.jsonl"
    prompts = asked(9)
    distilled(SomeCut(), prompts, one, settings)
    for number in (1, 2):
        distilled(SomeCut(), prompts, output, settings, shard=Shard(number, 2))
    assert merge(output).dropped == 5
    assert output.read_bytes() == one.read_bytes()
    assert json.loads(manifest_path(output).read_text()) == json.loads(
        manifest_path(one).read_text()
    )


class SomeCut(FakeDecoder):
    """Answers to prompts of odd length are short."""

    def answer(self, request, batch, limit):
        self.answer_tokens = 5 if len(request.prompt) % 2 else 12
        return super().answer(request, batch, limit)


def test_missing_shards_are_named(output: Path) -> None:
    for path in distil_shards(output, 4)[1::2]:
        path.unlink()
    with pytest.raises(UserError, match="missing: answers.2-of-4.jsonl, answers.4-of-4.jsonl"):
        merge(output)
    assert not output.exists()


def test_without_shards_the_sentence_says_how_to_write_one(output: Path) -> None:
    with pytest.raises(UserError, match=r"there is no shard of .*answers.jsonl.*--shard 1/4"):
        merge(output)
    with pytest.raises(UserError, match="there is no shard"):
        merge(output.parent / "nowhere" / "answers.jsonl")


def test_shards_of_two_splits_are_refused(output: Path) -> None:
    distil_shards(output, 2)
    distilled(RoundedByBatch(), asked(20), output, BATCHES, shard=Shard(1, 3))
    with pytest.raises(UserError, match="shards of 2 and of 3 parts"):
        merge(output)


def test_a_shard_that_lacks_rows_is_named(output: Path) -> None:
    second = distil_shards(output, 2)[1]
    half = second.read_bytes()[:-10]
    second.write_bytes(half)
    with pytest.raises(UserError, match=r"answers.2-of-2.jsonl lacks 1 of its 3 batches"):
        merge(output)
    assert second.read_bytes() == half


def test_a_hole_in_a_shard_is_named(output: Path) -> None:
    first = distil_shards(output, 2)[0]
    lines = first.read_bytes().splitlines(keepends=True)
    first.write_bytes(b"".join(lines[:1] + lines[2:]))
    for use in (
        lambda: merge(output),
        lambda: distilled(RoundedByBatch(), asked(20), output, BATCHES, shard=Shard(1, 2)),
    ):
        with pytest.raises(UserError, match="answers.1-of-2.jsonl has lost rows of its batch 0"):
            use()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"settings": replace(BATCHES, seed=3)}, "with seed 0, .*2-of-2.jsonl with 3"),
        ({"settings": replace(BATCHES, system="s")}, "with system None, .*2-of-2.jsonl with .s."),
        ({"prompts": asked(19)}, "1-of-2.jsonl and .*2-of-2.jsonl .* other prompts"),
        ({"decoder": RoundedByBatch(target=Target(tiny_llama(seed=1)))}, "other weights"),
    ],
)
def test_shards_of_other_distillations_are_refused(
    output: Path, change: dict, sentence: str
) -> None:
    distil_shards(output, 2)
    options = {"decoder": RoundedByBatch(), "prompts": asked(20), "settings": BATCHES} | change
    distilled(**options, output=output, overwrite=True, shard=Shard(2, 2))
    with pytest.raises(UserError, match=sentence):
        merge(output)


def test_a_renamed_shard_is_refused(output: Path) -> None:
    first, second = distil_shards(output, 2)
    for path in (manifest_path, Path):
        path(second).write_bytes(path(first).read_bytes())
    with pytest.raises(UserError, match="2-of-2.jsonl was written as shard 1/2, not 2/2"):
        merge(output)


def test_a_shard_without_its_manifest_is_refused(output: Path) -> None:
    manifest_path(distil_shards(output, 2)[1]).unlink()
    with pytest.raises(UserError, match=r"2-of-2.jsonl exists without .*copy it from where"):
        merge(output)


def test_a_shard_that_is_being_written_is_not_joined(output: Path) -> None:
    second = distil_shards(output, 2)[1]
    with (
        DistilledFile(second, BATCHES, shard=Shard(2, 2)),
        pytest.raises(UserError, match="another process is writing .*2-of-2"),
    ):
        merge(output)


def test_an_output_that_is_there_is_not_overwritten(output: Path) -> None:
    distil_shards(output, 2)
    output.write_text("mine\n")
    with pytest.raises(UserError, match="answers.jsonl exists already: remove it"):
        merge(output)
    assert output.read_text() == "mine\n"


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
