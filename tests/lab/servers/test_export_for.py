"""Heads for other servers: the layout that each reads, the script that starts it, its end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import byte_tokenizer
from transformers import LlamaForCausalLM
from written import DFLASH, DSPARK, EAGLE3, TARGET, random_head

from drafthead.core.errors import UserError
from drafthead.core.target.loading import vocabulary_of
from drafthead.core.target.target import Target
from drafthead.heads.formats.base import TargetFacts
from drafthead.infer.drafters.ngram_table import NgramTable
from drafthead.lab.servers.export_for import export_for, export_named
from drafthead.lab.servers.vllm_lookup import FOLDER

# Prints its arguments, as the programs that scripts start.
PRINTS = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> tuple[Target, str]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "target"
    model = LlamaForCausalLM(TARGET)
    model.save_pretrained(folder)
    return Target(model), str(folder)


@pytest.fixture
def exported(target, tmp_path):
    """Exports a random head for a server: what it did, and its folder."""

    def export(server: str, family: str, options: dict, paths: dict | None = None):
        loaded, name = target
        head = random_head(family, loaded, options)
        head.path_counts = paths
        folder = tmp_path / "served"
        facts = TargetFacts.of(loaded, name)
        return export_for(server, head, Path("runs/mine"), facts, loaded, folder), folder

    return export


def program(folder: Path, text: str) -> str:
    """An executable file."""
    path = folder / "program"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def started(folder: Path, server: str, programs: Path) -> list[str]:
    """What the script in a folder gives to its server."""
    variable = {"vllm": "VLLM", "sglang": "PYTHON", "llamacpp": "LLAMA_SERVER"}[server]
    environment = {**os.environ, variable: program(programs, PRINTS), "OPTIONS": "--one 1"}
    ran = subprocess.run(
        ["sh", str(folder / "serve.sh"), "--two"], env=environment, capture_output=True, check=True
    )
    return json.loads(ran.stdout)


@pytest.mark.parametrize(
    ("server", "kind", "options", "layout", "method"),
    [
        ("vllm", "eagle3", {}, "eagle3-vllm", "eagle3"),
        ("vllm", "eagle3", {**EAGLE3, "mask_token": 5}, "speculators", "peagle"),
        ("vllm", "parallel", DFLASH, "dflash", "dflash"),
        ("vllm", "parallel", {**DSPARK, "draft_vocab_size": 20}, "speculators", "dspark"),
        ("vllm", "medusa", {}, "vllm-medusa", "medusa"),
        ("sglang", "eagle3", {}, "eagle3-sglang", "EAGLE3"),
        ("sglang", "parallel", DSPARK, "dspark", "DSPARK"),
        ("llamacpp", "eagle3", {**EAGLE3, "draft_vocab_size": 20}, "eagle3-vllm", "draft-eagle3"),
        ("llamacpp", "parallel", DSPARK, "dspark", "draft-dspark"),
    ],
)
def test_a_server_gets_the_layout_that_it_reads(
    exported, server, kind, options, layout, method, tmp_path
):
    served, folder = exported(server, kind, options)
    assert (served.layout, served.method) == (layout, method)
    (folder / "head.gguf").touch()  # as if it had been converted
    (folder / "target.gguf").touch()
    arguments = started(folder, server, tmp_path)
    assert arguments[-3:] == ["--one", "1", "--two"]
    if server == "vllm":
        drafts = json.loads(arguments[arguments.index("--speculative-config") + 1])
        assert drafts["model"] == str(folder / "head")
        assert drafts["method"] == ("eagle3" if method == "peagle" else method)
        assert drafts.get("parallel_drafting", False) == (method == "peagle")
        assert drafts["num_speculative_tokens"] == served.tokens
    else:
        assert method in arguments


@pytest.mark.parametrize(
    ("server", "kind", "options", "told"),
    [
        ("llamacpp", "eagle3", {}, r"lacks head\.tap_norm 'each'.*eagle3-portable"),
        (
            "llamacpp",
            "eagle3",
            {**EAGLE3, "num_layers": 2, "norm_feedback": True},
            r"lacks head\.num_layers 2, head\.norm_feedback True;",
        ),
        ("llamacpp", "parallel", {**DSPARK, "correction": "gated"}, r"head\.correction 'gated'"),
        ("vllm", "eagle", {}, r"its reader of eagle lacks head\.fc_bias True"),
        ("vllm", "hydra", {}, r"family hydra: it reads heads of the families eagle, eagle3"),
        ("vllm", "parallel", {}, r"dflash cannot .*speculators cannot .*mask_token"),
        ("tgi", "medusa", {}, r"--for tgi: known servers are vllm, sglang, llamacpp"),
    ],
)
def test_what_a_server_lacks_is_said_with_what_helps(exported, server, kind, options, told):
    with pytest.raises(UserError, match=told):
        exported(server, kind, options)


@pytest.mark.parametrize(
    ("server", "kind", "method"),
    [
        ("vllm", "model", "draft_model"),
        ("vllm", "ngrams", "custom_class"),
        ("vllm", "lookup", "ngram"),
        ("sglang", "model", "STANDALONE"),
        ("llamacpp", "model", "draft-simple"),
        ("sglang", "ngrams", None),
    ],
)
def test_what_is_no_head_is_exported_too(server, kind, method, target, tmp_path):
    (_, name), folder, store = target, tmp_path / "served", tmp_path / "store"
    given = {"model": name, "ngrams": str(store), "lookup": "lookup"}[kind]
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(name)
    store.mkdir()
    NgramTable.of([[5, 6, 7]], vocabulary_of(tokenizer), 2).save(store)
    if method is None:
        with pytest.raises(UserError, match=r"cannot draft with ngrams:.*`data index --corpus`"):
            export_named(server, given, name, folder)
        return
    served = export_named(server, given, name, folder)
    assert (served.method, served.target) == (method, name)
    for file in ("head.gguf", "target.gguf"):  # as if they had been converted
        (folder / file).touch()
    arguments = started(folder, server, tmp_path)
    if server != "vllm":
        assert method in arguments and any(f"{folder}/head" in word for word in arguments)
        return
    drafts = json.loads(arguments[arguments.index("--speculative-config") + 1])
    assert drafts["method"] == method and drafts["num_speculative_tokens"] == served.tokens
    if kind == "ngrams":
        more = json.loads(arguments[arguments.index("--additional-config") + 1])
        assert more == {FOLDER: f"{folder}/head"} and drafts["model"].endswith(".LookupProposer")
    else:
        assert drafts.get("model") == (f"{folder}/head" if kind == "model" else None)


def test_no_folder_and_a_table_of_other_tokens_are_refused(target, tmp_path):
    (_, name), store = target, tmp_path / "store"
    byte_tokenizer().save_pretrained(name)
    store.mkdir()
    NgramTable.of([[5, 6, 7]], "other", 2).save(store)
    for given, words in {
        f"ngrams:{store}": "another tokenizer's tokens: make one",
        f"ngrams:{tmp_path}/none": "is no table of n-grams that can be read",
        f"model:{tmp_path}/none": r"none has no config\.json: name the folder",
    }.items():
        with pytest.raises(UserError, match=words):
            export_named("vllm", given, name, tmp_path / "served")
    assert not (tmp_path / "served").exists()


def test_k_follows_from_what_was_measured(exported, tmp_path):
    served, folder = exported("vllm", "eagle3", {"depth": 5})
    assert served.tokens == 3 and "was not measured" in (folder / "serve.sh").read_text()

    def counted(*right: int) -> dict:
        return {(0,) * depth: count for depth, count in enumerate((100, *right))}

    for right, best in (((90, 80, 70, 60, 50), range(4, 6)), ((60, 5, 2, 1, 0), range(1, 2))):
        (tmp_path / "served").rename(tmp_path / f"other{right[0]}")
        served, folder = exported("vllm", "eagle3", {"depth": 5}, counted(*right))
        assert served.tokens in best
        assert "of 100 places" in (folder / "serve.sh").read_text().replace("\n# ", " ")


def test_a_conversion_that_was_cut_short_is_made_again(exported, tmp_path, monkeypatch):
    _, folder = exported("llamacpp", "parallel", DSPARK)
    begun = f"#!{sys.executable}\nimport sys\nopen(sys.argv[-1], 'w')\nsys.exit(3)\n"
    monkeypatch.setenv("PYTHON", program(tmp_path, begun))
    monkeypatch.setenv("LLAMA_CPP", "sources")
    ran = subprocess.run(["sh", str(folder / "serve.sh")])
    assert ran.returncode == 3 and not (folder / "head.gguf").exists()
