"""The command line as a user meets it: answers, and one clear sentence for bad input."""

import importlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
from dataclasses import is_dataclass
from importlib import resources
from inspect import signature
from pathlib import Path

import pytest
from tiny import SPECIALS, byte_tokenizer

import drafthead
from drafthead.core.errors import UserError
from drafthead.core.settings import Refusing, declarations
from drafthead.core.target.target import Target
from drafthead.heads.base import HEADS
from drafthead.heads.formats.base import FORMATS
from drafthead.heads.formats.drafthead import save_head
from drafthead.heads.formats.loading import load_head
from drafthead.infer import Decoder
from drafthead.infer.planning.planner import PlannerSettings
from drafthead.infer.request.generation_config import KNOWN, PREPARED
from drafthead.lab.building.choices import FAMILIES
from drafthead.lab.races.contestants import Ours
from drafthead.lab.races.race import RacedAnswers as Answered
from drafthead.scripts import cli
from drafthead.scripts.options import FORMATS as LISTED
from drafthead.scripts.options import Answers, Model


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory, make_target, make_head) -> Path:
    """A target, a draft model, a head, and things that do not fit."""
    folder = tmp_path_factory.mktemp("models")
    target = make_target(seed=0, vocab=260)
    for name, model, tokenizer in (
        ("target", target, byte_tokenizer()),
        ("draft", make_target(seed=1, layers=1, vocab=260), byte_tokenizer()),
        ("stranger", make_target(seed=1, vocab=260), byte_tokenizer(SPECIALS[::-1])),
        ("narrow", make_target(seed=0, vocab=260, hidden=16), byte_tokenizer()),
    ):
        model.model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    save_head(make_head("medusa", target), folder / "head", target, "target", {})
    prompts = [{"prompt": f"prompt {n}"} for n in range(3)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)) + "\n")
    return folder


@pytest.fixture
def run(models_folder, drafthead):
    """Run `drafthead ...` in this process; `@name` stands for a path in the models folder."""

    def run(*arguments: str) -> tuple[int, str, str]:
        words = [f"{models_folder}/{a[1:]}" if a.startswith("@") else a for a in arguments]
        return drafthead(*words)

    return run


TARGET = ("--target", "@target")
HELLO = ("generate", *TARGET, "--prompt", "hello", "--dtype", "float32")


@pytest.fixture
def answers(run, tmp_path) -> Path:
    """The target's answers to the prompts."""
    path = tmp_path / "answers.jsonl"
    task = ("data", "distill", *TARGET, "--prompts", "@prompts.jsonl", "--output", str(path))
    assert run(*task, "--max-new-tokens", "40")[0] == 0
    return path


def test_the_version_is_the_distributions(run) -> None:
    assert run("--version")[:2] == (0, f"{importlib.metadata.version('drafthead')}\n")
    assert drafthead.__version__ == importlib.metadata.version("drafthead")
    with pytest.raises(AttributeError, match="'drafthead' has no attribute 'versions'"):
        _ = drafthead.versions


def test_help_lists_the_values_that_there_are(run) -> None:
    assert {*HEADS} < {*FAMILIES.split(", ")}
    assert {*LISTED.split(", ")} == {*FORMATS}
    for verb in (["build"], ["head", "evaluate"], ["compare"], ["serve"]):
        help = run(*verb, "--help")[1]
        assert "list[" not in help and ("[default: 0.0]" not in help or verb != ["build"])


def test_help_waits_for_no_library() -> None:
    """Neither the list of verbs nor the help of any verb."""
    program = (
        "import sys; from drafthead.scripts import cli\n"
        "for verb in ['', *cli.GROUPS, *cli.verb_names()]:\n"
        "    sys.argv = ['drafthead', *verb.split(), '--help']\n"
        "    try: cli.main()\n"
        "    except SystemExit as stop: assert not stop.code, verb\n"
        "print('loaded', {'torch', 'transformers', 'numpy', 'rich', 'yaml'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.endswith("loaded set()\n"), done.stdout + done.stderr


MISSING = (
    ("generate", "--prompt", "x", "--target", "./none"),
    ("chat", "--target", "smollm2", "--draft", "runs/no/head"),
    ("compare", "--target", "smollm2", "--output", "x", "--prompts", "none.jsonl"),
    ("build", "--target", "smollm2", "--minutes", "1", "--prompts", "none.jsonl"),
    ("train", "--config", "none.yaml"),
    ("train", "--config", "@/eagle3.yaml"),
    ("train", "--config", "@/demo_medusa.yaml", "train.max_minuts=3"),
    ("train", "--config", "@/demo_medusa.yaml", "target.name=smollm2", "data.train=none.jsonl"),
    ("head", "info", "smolm2-eagle3"),
    ("head", "evaluate", "smollm2-eagle3", "--target", "smollm2", "--data", "none.jsonl"),
)


def test_a_wrong_name_is_refused_before_anything_is_imported(tmp_path) -> None:
    """In one sentence each, whatever verb it is for."""
    program = (
        "import json, sys; from drafthead.scripts import cli\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    sys.argv = ['drafthead', *words]\n"
        "    try: cli.main()\n"
        "    except SystemExit as stop: assert stop.code == 2, words\n"
        "print('loaded', {'torch', 'transformers', 'numpy', 'rich'} & {*sys.modules})"
    )
    configs = str(resources.files("drafthead.configs"))
    lines = [[word.replace("@", configs) for word in words] for words in MISSING]
    command = [sys.executable, "-c", program, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "loaded set()\n", done.stdout + done.stderr
    said = done.stderr.splitlines()
    assert len(said) == len(MISSING) and all(line.startswith("drafthead: ") for line in said)
    for place, words in ((5, "stands for your model"), (6, "did you mean train.max_minutes")):
        assert words in said[place]
    assert "did you mean smollm2-eagle3" in said[8]


# Options that name a model, a head, drafts or data.
NAMES = {"target", "draft", "head", "init_from", "before", "data", "prompts", "about"}


@pytest.mark.parametrize("verb", cli.verb_names())
def test_options_that_name_files_refuse_what_is_not_there(verb) -> None:
    module = cli.OTHER_FILES.get(verb, verb.replace(" ", "."))
    main = importlib.import_module(f"drafthead.scripts.{module}").main
    declared = dict(signature(main, eval_str=True).parameters)
    for name, group in list(declared.items()):
        if is_dataclass(group.annotation):
            declared |= signature(declared.pop(name).annotation).parameters
    for name in NAMES & declared.keys():
        parts = declarations(declared[name].annotation)
        assert any(isinstance(part, Refusing) for part in parts), name


def test_settings_and_rules_are_read(run) -> None:
    task = ("generate", *TARGET, "--prompt", "hello", "--max-new-tokens", "4")
    rule = ("--temperature", "1", "--draft", "lookup", "--rule", "lenient:lenience=1")
    assert run(*task, *rule)[0] == 0
    for words, sentence in (
        (("--set", "temperature=1"), "--set temperature: write --temperature instead"),
        (("--set", "nothing=1"), "nothing=1, which is not supported"),
        (("--set", "min_p"), "--set is written NAME=VALUE"),
        (("--temperature", "1", "--rule", "lenient:top=1"), "top"),
    ):
        status, _, err = run(*task, *words)
        assert status == 2 and sentence in err


@pytest.fixture(scope="module")
def decoder(make_target) -> Decoder:
    return Decoder(Target(make_target(vocab=260).model, byte_tokenizer()))


WRONG = {
    "max_time": "x", "num_beams": "0", "repetition_penalty": "x", "forced_eos_token_id": "true",
    "frequency_penalty": "[1]", "no_repeat_ngram_size": "true", "suppress_tokens": "3",
    "stop_strings": "1", "remove_invalid_values": "x", "early_stopping": '{"a": 1}',
}  # fmt: skip


@pytest.mark.parametrize("key", sorted(KNOWN | PREPARED))
def test_a_wrong_value_of_any_setting_is_one_sentence(decoder, key) -> None:
    for value in {"x", "-1", "[1]", "1.5", "true", '{"a": 1}', '""', WRONG.get(key, "x")}:
        sentence = ""
        try:
            how = Answers(max_new_tokens=1, setting=[f"{key}={value}"]).options()
            decoder.generate("hi", **how)
        except UserError as error:
            sentence = str(error)
            assert "\n" not in sentence
        assert key not in WRONG or value != WRONG[key] or key in sentence


def test_help_lists_the_verbs_and_each_verb_has_its_own(run) -> None:
    status, out, _ = run("--help")
    assert status == 0
    assert all(word in out for word in (*cli.VERBS, *cli.GROUPS))
    for group, (_, verbs) in cli.GROUPS.items():
        status, out, _ = run(group, "--help")
        assert status == 0 and all(f"drafthead {group} {verb}" in out for verb in verbs)
    for verb in cli.verb_names():
        status, out, _ = run(*verb.split(), "--help")
        assert status == 0 and "Usage" in out and len(out) > 300


@pytest.mark.parametrize(
    "drafter",
    [
        (),
        ("--draft", "@head"),
        ("--draft", "@draft"),
        ("--draft", "@stranger"),  # another tokenizer
        ("--draft", "lookup"),
    ],
)
def test_generate_says_the_same_with_every_drafter(run, drafter) -> None:
    options = ("--prompt", "hello", "--max-new-tokens", "20", "--dtype", "float32")
    status, plain, _ = run("generate", "--target", "@target", *options)
    assert status == 0
    status, out, err = run("generate", "--target", "@target", *options, *drafter)
    assert (status, out) == (0, plain)
    assert "tokens/s" in err and "tau" in err


def test_a_head_is_exported_described_used_and_imported(run, tmp_path) -> None:
    served, back = str(tmp_path / "served"), str(tmp_path / "back")
    status, out, _ = run("head", "export", "@head", "--format", "vllm-medusa", "--output", served)
    assert status == 0 and "replayed within" in out
    status, out, _ = run("head", "info", served)
    assert status == 0 and "vllm-medusa" in out and "hidden size 32" in out
    assert run("head", "import", served, "--output", back)[0] == 0
    status, out, _ = run("head", "info", back)
    assert status == 0 and "imported_from" in out and "output of layer" in out
    assert run(*HELLO, "--draft", served)[:2] == run(*HELLO, "--draft", back)[:2] == run(*HELLO)[:2]
    status, _, err = run("head", "export", "@head", "--format", "medusa", "--output", served)
    assert status == 2 and "is not empty" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "served"]


@pytest.mark.parametrize(
    "options",
    [
        ("--set", "repetition_penalty=1.5"),
        ("--set", "frequency_penalty=1.5", "--set", "presence_penalty=0.5"),
        ("--set", "no_repeat_ngram_size=1"),
        ("--set", "min_new_tokens=50", "--set", "repetition_penalty=1.2"),
    ],
)
def test_generate_processes_logits_with_every_drafter(run, options) -> None:
    status, processed, _ = run(*HELLO, *options)
    assert status == 0 and processed != run(*HELLO)[1]
    assert run(*HELLO, *options, "--draft", "@head")[:2] == (0, processed)


def test_generate_ends_at_a_stop_string(run) -> None:
    whole = run(*HELLO, "--draft", "@head")[1].rstrip("\n")
    letter = next(c for c in whole[5:] if c.isalpha())
    cut = run(*HELLO, "--draft", "@head", "--set", f"stop_strings={letter}")[1].rstrip("\n")
    assert cut == whole[: whole.index(letter) + 1]


def test_generate_prints_log_probabilities_and_why_the_answer_ended(run) -> None:
    status, out, err = run(*HELLO, "--max-new-tokens", "3", "--logprobs", "2", "--draft", "@head")
    assert status == 0 and "3 tokens, ended by length" in err
    lines = out.splitlines()[-4:]
    assert lines[0].split() == ["chosen", "target", "token"]
    for line in lines[1:]:
        chosen, raw, *rest = line.split()
        assert float(chosen) == float(raw) < 0 and " | " in line and rest[-1] < "0"
    status, out, err = run(*HELLO, "--set", "max_time=1e-9")
    assert status == 0 and "1 tokens, ended by time" in err


def test_generate_prints_several_answers(run) -> None:
    task = ("generate", *TARGET, "--prompt", "hello", "--set", "num_return_sequences=2")
    status, out, err = run(*task, "--temperature", "1", "--max-new-tokens", "4")
    assert status == 0 and out.startswith("[0]\n") and "\n[1]\n" in out
    assert "8 tokens" in err or "end_token" in err
    status, _, err = run(*task)
    assert status == 2 and "do not support `num_return_sequences`" in err


def test_generate_prints_the_answers_of_beam_search_with_their_scores(run) -> None:
    task = ("generate", *TARGET, "--prompt", "hello", "--max-new-tokens", "4")
    task += ("--set", "num_beams=3")
    status, out, err = run(*task, "--set", "num_return_sequences=2", "--draft", "lookup")
    lines = [line.split() for line in out.splitlines() if line.startswith("[")]
    assert status == 0 and "tau" in err
    assert [line[:2] for line in lines] == [["[0]", "score"], ["[1]", "score"]]
    assert 0 > float(lines[0][2]) >= float(lines[1][2])
    status, alone, _ = run(*task)
    assert status == 0 and alone == out[: len(alone)]


def test_compare_goes_on_with_what_was_raced_before_a_stop(run, monkeypatch, tmp_path) -> None:
    """Three prompts, four ways of ours, a round: Ctrl-C comes in the second prompt."""
    decoded: list[str] = []
    decode, stop_at = Ours.decode, [0]

    def counted(contestant: Ours, prompts: list[list[int]], most: int, seed: int) -> Answered:
        if most == 20:  # preparation decodes 16
            decoded.append(contestant.mode)
            if len(decoded) == stop_at[0]:
                raise KeyboardInterrupt
        return decode(contestant, prompts, most, seed)

    def raced(stop: int, *more: str) -> tuple[int, str, int]:
        """Status, output, and how many answers were decoded before the stop, if there is one."""
        decoded.clear()
        stop_at[0] = stop
        status, out, _ = run(
            "compare", "--target", "@target", "--draft", "@head", "--prompts", "@prompts.jsonl",
            "--output", str(tmp_path), "--rounds", "1", "--max-new-tokens", "20", *more,
        )  # fmt: skip
        return status, out, len(decoded)

    def tokens() -> dict[str, int]:
        rows = json.loads((tmp_path / "comparison.json").read_text())["rows"]
        return {row["mode"]: row["tokens"] for row in rows}

    monkeypatch.setattr(Ours, "decode", counted)
    assert raced(6)[::2] == (130, 6)
    status, out, answers = raced(0)
    assert (status, answers) == (0, 8) and "goes on after 1 batches" in out
    found = tokens()
    assert [*found] == ["plain", "generate", "head", "head + lookup", "lookup"]
    assert (tmp_path / "comparison.png").exists()
    status, out, answers = raced(6)
    assert (status, answers) == (130, 6) and "goes on" not in out, "a race that has ended is over"
    status, out, answers = raced(0, "--seed", "1")
    assert (status, answers) == (0, 12)
    assert "is of another race (not the same: command): begins again" in out
    assert tokens() == found, "greedy answers, in one go"


def test_doctor_says_what_it_has_seen(run, answers, tmp_path) -> None:
    status, out, _ = run(
        "head", "doctor", "@head", *TARGET, "--data", str(answers),
        "--output", str(tmp_path / "doctor.json"),
    )  # fmt: skip
    assert status == 0 and "checks, faults: " in out
    record = json.loads((tmp_path / "doctor.json").read_text())
    assert record["findings"]["answers of another model"]["remedy"] is None
    assert record["findings"]["plain decoding is faster"]["evidence"]


ROWS = [{"task": f"count {n}", "text": "else", "answer": "abcd " * (2 + n % 3)} for n in range(9)]
READERS = (
    ("head", "evaluate", "@head"),
    ("head", "doctor", "@head"),
    ("data", "index", "--output", "store"),
    ("data", "inspect"),
)


@pytest.mark.parametrize("verb", READERS, ids=lambda words: words[1])
def test_verbs_that_read_answers_take_columns_template_arguments_and_strict(
    run, monkeypatch, tmp_path, verb
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, [*ROWS, {"text": "no task"}])) + "\n")
    words = (*verb, "--target", "@target", "--data", "rows.jsonl")
    words += ("--prompt-column", "task")
    status, _, err = run(*words, "--strict")
    assert status == 2 and "no column `task`, but `text` (strict" in err
    status, _, err = run(*words, "--template-argument", "effort=1")
    assert status == 2 and "does not read effort" in err
    assert run(*words)[0] == 0, "nine rows can be read"


def test_doctor_renders_prompts_with_the_arguments_of_the_command(
    run, models_folder, monkeypatch, tmp_path
) -> None:
    """Rows that do not say theirs hold prompts that the bare template does not make."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template += "{{ effort or '' }}"
    shutil.copytree(models_folder / "target", tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    given = ("--template-argument", "effort=7")
    target = ("--target", "target")
    run("data", "distill", *target, "--prompts", "@prompts.jsonl", "--output", "rows.jsonl", *given)
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    told = [row.pop("chat_template_kwargs") for row in rows]
    assert told == [{"effort": 7}] * 3
    Path("untold.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    words = ("head", "doctor", "@head", *target, "--data", "untold.jsonl")
    for more, differing in (((), "3 of 3"), (given, "0 of 3")):
        assert run(*words, "--output", "found.json", *more)[0] == 0
        found = json.loads(Path("found.json").read_text())["findings"]
        assert found["another chat template"]["evidence"].startswith(differing)


def test_evaluate_prints_and_writes_what_a_head_would_bring(run, answers, tmp_path) -> None:
    status, out, _ = run(
        "head", "evaluate", "@head", *TARGET, "--data", str(answers),
        "--data", "@prompts.jsonl",        "--output", str(tmp_path / "found.json"),
    )  # fmt: skip
    assert status == 2, "prompts without answers have nothing to measure"
    status, out, _ = run(
        "head", "evaluate", "@head", *TARGET, "--data", str(answers),
        "--output", str(tmp_path / "found.json"),
    )  # fmt: skip
    assert status == 0 and "alpha" in out and "chain of 3" in out
    found = json.loads((tmp_path / "found.json").read_text())["data"][str(answers)]
    assert found["tau_tree"]["64"] >= found["tau_chain"] >= found["tau_short_chain"] >= 1
    assert "tau by the tokens before a step" in out
    every = found["by_length"]["before: from 0"]  # no answer is longer
    assert every["tokens"] == found["anchors"] and every["64 nodes"] == found["tau_tree"]["64"]
    status, _, error = run(
        "head", "evaluate", "@head", *TARGET, "--data", str(answers), "--max-length", "1"
    )
    assert status == 2 and "within 1 tokens" in error


def test_evaluate_writes_what_was_accepted_into_the_head(
    run, answers, models_folder, tmp_path
) -> None:
    head = tmp_path / "head"
    shutil.copytree(models_folder / "head", head)
    target = Decoder.from_pretrained(str(models_folder / "target")).target

    def accepted_after(*data: str) -> dict[tuple[int, ...], int]:
        files = [word for name in data for word in ("--data", name)]
        task = ("head", "evaluate", str(head), *TARGET, *files)
        status, _, _ = run(*task, "--save-acceptance")
        assert status == 0
        return load_head(head, target).path_counts

    assert load_head(head, target).path_counts is None
    once = accepted_after(str(answers))
    twice = tmp_path / "twice.jsonl"
    shutil.copy(answers, twice)
    assert once[()] > 0, "the positions that were drafted from"
    assert accepted_after(str(answers), str(twice)) == {p: 2 * n for p, n in once.items()}


def test_evaluate_writes_into_heads_of_our_format_only(run, tmp_path) -> None:
    for head in ("OWNER/NAME", str(tmp_path)):
        status, _, error = run(
            "head", "evaluate", head, "--target", "@target", "--data", "@prompts.jsonl",
            "--save-acceptance",
        )  # fmt: skip
        assert status == 2 and f"{head} is none" in error


def test_plan_tree_keeps_its_times_until_fresh_ones_are_asked_for(
    run, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    task = ("explain", "tree", *TARGET, "--draft", "@head", "--output", str(tmp_path / "plan.json"))
    found = []
    for options, when in (((), "timed now"), ((), "timed by"), (("--fresh",), "timed now")):
        status, out, _ = run(*task, *options)
        assert status == 0 and when in out and "never measured" in out
        sizes = json.loads((tmp_path / "plan.json").read_text())["sizes"]
        found.append([size["step_seconds"] for size in sizes])
        enough = max(size["tokens_per_second"] for size in sizes) / PlannerSettings().required_gain
        best = next(size for size in sizes if size["tokens_per_second"] >= enough)
        assert [size for size in sizes if size["chosen"]] == [best]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("options", "verifier", "verdict"),
    [
        (
            ("--rule", "traversal", "--top-p", "0.9", "--repetition-penalty", "1.3"),
            "traversal",
            "PASS",
        ),
        (("--rule", "typical"), "typical", "FAIL"),
        pytest.param(("--compile",), "match", "PASS", marks=pytest.mark.slow),
    ],
)
def test_verify_exactness_says_so_in_one_line_and_its_status(
    run, tmp_path, monkeypatch, options, verifier, verdict
) -> None:
    monkeypatch.setattr("drafthead.lab.exactness.exactness.BATCHES", 1)
    status, out, _ = run(
        "verify", "--target", "@target", "--draft", "@draft", "--limit", "2",
        "--samples", "200", "--answers", "8", "--max-new-tokens", "24",
        "--output", str(tmp_path / "exactness.json"), *options,
    )  # fmt: skip
    assert status == (verdict == "FAIL")
    assert any(line.startswith(f"{verdict} with {verifier}") for line in out.splitlines())
    content = json.loads((tmp_path / "exactness.json").read_text())
    assert (content["verdict"], content["verifier"]) == (verdict, verifier)
    assert content["compile"] == ("--compile" in options)
    assert content["machine"] and content["versions"] and "verify" in content["command"]
    assert set(content["parts"]) == {"rule on tables", "first 3 tokens", "later tokens"}


def test_verify_exactness_at_temperature_zero_compares_greedy_answers(run) -> None:
    task = ("verify", "--target", "@target", "--prompts", "@prompts.jsonl")
    status, out, _ = run(*task, "--draft", "@head", "--temperature", "0")
    assert status == 0
    assert "3 of 3 equal plain decoding's" in out and "samples" not in out


def damaged(folder: Path, name: str, tmp_path: Path) -> str:
    """A copy of a model whose weights end too early."""
    copy = tmp_path / name
    copy.mkdir()
    for file in (folder / name).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return str(copy)


RACE = (*TARGET, "--prompts", "@prompts.jsonl", "--output", "unused")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("generate", "--target", "nowhere/at/all", "--prompt", "x"), "does not exist"),
        (("generate", *TARGET, "--prompt", " "), "prompt is empty"),
        (("generate", *TARGET, "--prompt", "x" * 300), "context holds 256"),
        (("generate", *TARGET, "--prompt", "x", "--rule", "exact"), "unknown verifier 'exact'"),
        (("generate", *TARGET, "--prompt", "x", "--temperature", "-1"), "temperature"),
        (("generate", *TARGET, "--prompt", "x", "--dtype", "int9"), "unknown dtype 'int9'"),
        (("generate", *TARGET, "--prompt", "x", "--device", "tpu9"), "unknown device 'tpu9'"),
        (("generate", *TARGET, "--prompt", "x", "--draft", "head:nohead"), "does not exist"),
        (
            ("generate", "--target", "@narrow", "--prompt", "x", "--draft", "@head"),
            "hidden_size 32, but this target has hidden_size 16",
        ),
        (
            ("generate", *TARGET, "--prompt", "x", "--draft", "@head", "--draft", "@draft"),
            "to draft: only lookup, ngrams, answers can be added to it",
        ),
        (
            ("generate", *TARGET, "--prompt", "x", "--tree-nodes", "5"),
            "tree_nodes=5 needs a head, a draft model, own layers or lookup",
        ),
        (
            ("generate", *TARGET, "--prompt", "x", "--draft", "@head", "--draft-tokens", "5"),
            "draft_tokens is for draft models, own layers and lookup alone",
        ),
        (
            ("generate", *TARGET, "--prompt", "x", "--draft", "layers:1-4"),
            "layers 1-4 cannot draft: the target has layers 0 to 1",
        ),
        (("compare", *RACE, "--draft", "layers:two"), "layers:two is not a list of layers"),
        (("compare", *RACE, "--rounds", "0"), "at least 1"),
        (("compare", *RACE, "--draft", "answers"), "compare cannot draft from answers"),
        (
            ("compare", *RACE, "--draft", "@head", "--draft", "@head"),
            "two drafters are called head: rename",
        ),
        (("verify", *TARGET), "choose the drafter to test with --draft"),
        (("verify", *TARGET, "--draft", "lookup", "--samples", "5"), "at least 100"),
        (("verify", *TARGET, "--draft", "lookup", "--false-alarm", "2"), "between 0 and 1"),
        (
            ("verify", *TARGET, "--draft", "lookup", "--repetition-penalty", "0"),
            "--repetition-penalty must be at least 0.01, got 0",
        ),
        (("verify", *TARGET, "--draft", "lookup", "--rule", "greedy"), "would ignore temperature"),
        (("compare", *RACE, "--draft", "@head", "--tree-nodes", "1"), "at least 2"),
        (("compare", *RACE, "--max-new-tokens", "256"), "no prompt"),
        (("compare", *RACE, "--batch-size", "0"), "--batch-size must be at least 1, got 0"),
        (("compare", *RACE, "--max-new-tokens", "1"), "no decoding to time"),
        (("explain", "tree", *TARGET, "--draft", "@nohead"), "does not exist"),
        (("head", "info", "@nohead"), "does not exist"),
        (("head", "import", "@target", "--output", "unused"), "no draft head of a known format"),
        (("head", "export", "@head", "--format", "gguf", "--output", "unused"), "known formats: "),
        (
            ("head", "export", "@head", "--format", "eagle", "--output", "unused"),
            "eagle cannot express a head of the family medusa",
        ),
        (
            ("explain", "tree", *TARGET, "--draft", "@head", "--batch-size", "0"),
            "--batch-size must be at least 1",
        ),
    ],
)
def test_bad_input_gives_one_sentence_and_a_status(
    run, monkeypatch, tmp_path, arguments, complaint
) -> None:
    monkeypatch.chdir(tmp_path)  # a race that is refused at its end has kept its answers
    status, _, err = run(*arguments)
    assert status == 2
    assert complaint in err
    assert "Traceback" not in err
    assert err.strip().splitlines()[-1].startswith("drafthead: ")


def test_a_truncated_target_is_named(run, models_folder, tmp_path) -> None:
    folder = damaged(models_folder, "target", tmp_path)
    status, _, err = run("generate", "--target", folder, "--prompt", "x")
    assert status == 2 and folder in err and "Traceback" not in err


def test_a_full_disk_is_said_in_one_sentence(run, monkeypatch, tmp_path) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device", "comparison.json")

    monkeypatch.setattr("drafthead.lab.reports.report.Report.write", no_space)
    output = ("--output", str(tmp_path / "race"), "--rounds", "1", "--max-new-tokens", "4")
    status, _, err = run("compare", *TARGET, "--prompts", "@prompts.jsonl", *output)
    assert status == 1
    assert err.strip().splitlines()[-1] == "drafthead: No space left on device: comparison.json"


def test_ctrl_c_ends_a_verb_with_one_sentence(run, monkeypatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("drafthead.infer.decoder.loaded_target", interrupt)
    status, _, err = run("generate", *TARGET, "--prompt", "x")
    assert status == 130
    assert err.strip().splitlines()[-1].startswith("drafthead: interrupted; what was written")


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("model.gguf", {}, 700),
        ("model.gguf", {"dtype": "float32"}, 0),
        ("model.gguf", {"device": "cuda"}, 0),
        (".", {"dtype": "bfloat16"}, 0),
    ],
)
def test_memory_is_touched_ahead_for_blocks_that_will_be_packed(
    tmp_path, name: str, options: dict[str, str], expected: int
) -> None:
    (tmp_path / "model.gguf").write_bytes(bytes(800))
    model = Model(target=str(tmp_path / name), **options)
    assert model.packed_bytes() == expected
