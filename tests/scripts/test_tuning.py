"""`drafthead build --continue`: a head goes on with served answers, and old races new."""

import json
from pathlib import Path

import pytest
from drafters import make_head
from fastapi.testclient import TestClient
from tiny import write_target

from drafthead.core.errors import UserError
from drafthead.core.target.any_target import load_decoder_only
from drafthead.heads.formats.drafthead import save_head
from drafthead.infer import Decoder
from drafthead.lab.building.choices import BuildOptions, Choices
from drafthead.scripts import build, options
from drafthead.scripts.building.tuning import Tuning
from drafthead.serve.app import make_app
from drafthead.serve.server_options import ServerOptions
from drafthead.train.data.conversations import read_conversations

SETTINGS = {"depth": 3, "ttt_steps": 2, "draft_vocab_size": 0}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a head for it, and what a server of both has recorded."""
    place = tmp_path_factory.mktemp("tuning")
    write_target(place / "target", hidden_size=32)
    target = load_decoder_only(str(place / "target"), "float32", "cpu")
    head = make_head("eagle3", target, **SETTINGS)
    save_head(head, place / "head", target, str(place / "target"), {})
    options = ServerOptions("tiny", record=place / "served.jsonl", target=str(place / "target"))
    with TestClient(make_app(Decoder(target), options)) as client:
        for number in range(20):
            body = {"messages": [{"role": "user", "content": f"ask {number}"}], "max_tokens": 24}
            client.post("/v1/chat/completions", json={**body, "temperature": 0})
    return place


def tune(place: Path, **changes: object) -> None:
    model = options.Model(target=str(place / "target"), dtype="float32", device="cpu")
    given = {"before": place / "head", "data": place / "served.jsonl", "minutes": 0.05, **changes}
    build.main(model=model, build=BuildOptions(compile=False), **given)


@pytest.mark.slow
def test_a_head_goes_on_with_what_was_served_and_races_the_old_one(place, capsys) -> None:
    output = place / "tuned"
    tune(place, output=output)
    said = capsys.readouterr().out
    record = json.loads((output / "tuning.json").read_text())
    better = record[record["better"]]
    assert f"the {record['better']} drafts are better" in said and "/v1/drafts" in said
    assert json.dumps({"draft": better["fastest"]}) in said
    assert record["new"]["tau"] >= 1 and record["old"]["tau"] >= 1
    parts = [read_conversations(output / f"{name}.jsonl") for name in ("answers", "held_out")]
    prompts = [{tuple(row.tokens.answers[0].prompt) for row in part} for part in parts]
    assert [*map(len, prompts)] == [16, 4] and not prompts[0] & prompts[1]
    own = Decoder.from_pretrained(str(place / "target"), draft=record["new"]["drafts"])
    assert own.drafter.names == ("head", "ngrams", "lookup")
    with pytest.raises(UserError, match="is there already"):
        tune(place, output=output)


def test_rows_that_teach_nothing_are_left_out(place, tmp_path) -> None:
    """Such as messages without a content, which a server takes and records, and torn ones."""
    lines = (place / "served.jsonl").read_text().splitlines(keepends=True)
    nothing = json.loads(lines[0]) | {"messages": [{"role": "user", "content": None}]}
    served = tmp_path / "served.jsonl"
    served.write_text(json.dumps(nothing) + "\n\n" + "".join(lines) + lines[0][:40])
    model = options.Model(target="model", dtype="float32", device="cpu")
    tuning = Tuning(Choices(**vars(model), minutes=1), tmp_path, served, tmp_path / "new")
    tuning._part()
    files = tuning.source.answers, tuning.source.held_out
    rows = [row for path in files for row in path.read_text().splitlines(keepends=True)]
    assert sorted(map(json.dumps, map(json.loads, rows))) == sorted(
        map(json.dumps, map(json.loads, lines))
    )


def test_what_cannot_be_tuned_is_refused(place, tmp_path) -> None:
    few, texts = tmp_path / "few.jsonl", tmp_path / "texts.jsonl"
    lines = (place / "served.jsonl").read_text().splitlines(keepends=True)
    few.write_text("".join(lines[:5]))
    texts.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    record = {"choices": {"target": "other"}, "stages": {}}
    other = tmp_path / "other"
    other.mkdir()
    (other / "head").symlink_to(place / "head")
    (other / "build.yaml").write_text(json.dumps(record))
    for changes, sentence in (
        ({"data": few}, "has answers to 5 prompts: 16 are needed"),
        ({"data": texts}, "has no token ids"),
        ({"before": tmp_path}, "holds no head to go on with"),
        ({"before": Path("smollm2-eagle3"), "data": few}, "has answers to 5 prompts"),
        ({"before": other}, "is for --target other, not"),
        ({"data": None}, "go together"),
        ({"plan": True}, "without --plan"),
        ({"minutes": None}, "a build needs a time budget"),
    ):
        with pytest.raises(UserError, match=sentence):
            tune(place, **{"output": tmp_path / "new", **changes})
        assert not (tmp_path / "new").exists()
