"""The verb data distill, from its options to the files and what is printed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from completion_server import Completions, serving
from tiny import target_folder
from typer import Typer
from typer.testing import CliRunner, Result

from drafthead.core.errors import UserError
from drafthead.core.settings import template_values
from drafthead.infer import Decoder
from drafthead.scripts.data import distill
from drafthead.scripts.data.distill import system_text
from drafthead.scripts.options import with_groups

Run = Callable[..., Result]


target = target_folder(initializer_range=0.5)


@pytest.fixture
def run(target: Path, tmp_path: Path) -> Run:
    """`distill` of five prompts with these options; errors are raised."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "ab" * i}) + "\n" for i in range(1, 6)))
    app = Typer()
    app.command()(with_groups(distill.main))

    def run(output: str, *options: object, local: bool = True) -> Result:
        arguments = ["--target", target, "--prompts", prompts, "--output", tmp_path / output]
        arguments += ["--max-new-tokens", 8, *(["--dtype", "float32"] if local else []), *options]
        result = CliRunner().invoke(app, [str(part) for part in arguments])
        if result.exception is not None:
            raise result.exception
        return result

    return run


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_table_shows_lengths_and_ends(run: Run) -> None:
    shown = " ".join(run("a.jsonl").stdout.split())
    assert "rows 5 answers 5 tokens" in shown
    assert "tokens an answer: median, 95 %, most" in shown
    assert "answers cut at the limit (raise --max-new-tokens)" in shown
    assert "5 rows written, 0 were there before" in shown


def test_a_server_answers_as_the_target_does_here(run: Run, target: Path, tmp_path: Path) -> None:
    decoder = Decoder.from_pretrained(target, dtype="float32", device="cpu")
    run("near.jsonl")
    with serving(Completions(decoder)) as url:
        run("far.jsonl", "--server", url, local=False)
        with pytest.raises(UserError, match="with --server .* leave --dtype out"):
            run("other.jsonl", "--server", url)
        with pytest.raises(UserError, match="with --server .* leave --ray out"):
            run("other.jsonl", "--server", url, "--ray", "auto", local=False)
        with pytest.raises(UserError, match="far.jsonl was started with server_model 'served'"):
            run("far.jsonl", local=False)
    near, far = rows_of(tmp_path / "near.jsonl"), rows_of(tmp_path / "far.jsonl")
    assert [row["token_ids"] for row in near] == [row["token_ids"] for row in far]


def test_a_system_message_comes_from_the_command_line_or_a_file(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "system.txt"
    text.write_text("Be short.\n")
    run("a.jsonl", "--system", f"@{text}")
    run("b.jsonl", "--system", "Be short.")
    a, b = rows_of(tmp_path / "a.jsonl"), rows_of(tmp_path / "b.jsonl")
    assert a == b
    assert a[0]["messages"][0] == {"role": "system", "content": "Be short."}
    with pytest.raises(UserError, match=r"--system @.*nowhere: the file cannot be read as text"):
        system_text(f"@{tmp_path}/nowhere")


def test_template_arguments_are_json() -> None:
    given = ["enable_thinking=false", "effort=3", 'mode="a=b"', "tools=[]"]
    assert template_values(given) == {
        "enable_thinking": False, "effort": 3, "mode": "a=b", "tools": [],
    }  # fmt: skip
    assert template_values(None) == {}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["thinking"], "is written NAME=VALUE, got thinking"),
        (["=1"], "is written NAME=VALUE"),
        (["a=False"], "False is not JSON; write true, false"),
        (["a="], "nothing is not JSON"),
        (["a=1", "a=2"], "a is given twice"),
    ],
)
def test_arguments_in_another_form_are_refused(given: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        template_values(given)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--samples", 2), "--samples 2 at temperature 0"),
        (("--ray-cores", 1), "give --ray too"),
        (("--server-model", "a"), "give --server too"),
        (("--template-argument", "unread=1"), "does not read unread"),
    ],
)
def test_a_wrong_option_leaves_the_output_as_it_is(
    run: Run, tmp_path: Path, options: tuple[object, ...], sentence: str
) -> None:
    run("a.jsonl")
    before = (tmp_path / "a.jsonl").read_bytes()
    with pytest.raises(UserError, match=sentence):
        run("a.jsonl", "--overwrite", *options)
    assert (tmp_path / "a.jsonl").read_bytes() == before
