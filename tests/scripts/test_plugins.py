"""Drafters, rules and head families of another package: the shell finds them by their names."""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from runs import write_inputs, write_run
from typer.testing import CliRunner

from drafthead.core.errors import UserError
from drafthead.core.registry import waiting_plugins
from drafthead.heads.base import HEADS
from drafthead.infer.loading.loaded import DRAFTERS
from drafthead.infer.verifiers import VERIFIERS
from drafthead.scripts.cli import build_app

MODULE = '''
    from drafthead.heads.base import register_head
    from drafthead.heads.families.medusa.head import MedusaConfig, MedusaHeads
    from drafthead.infer.drafters.lookup import PromptLookup
    from drafthead.infer.loading.loaded import register_drafter
    from drafthead.infer.verifiers.base import register_verifier
    from drafthead.infer.verifiers.greedy import greedy


    @register_head("mine", MedusaConfig)
    class Mine(MedusaHeads):
        """Medusa under another name."""


    @register_drafter("echo", "LENGTH")
    def echo(length, fitting):
        """Lookup of a length."""
        return PromptLookup(int(length))


    @register_verifier("careful", lossless=True, reads="logits", greedy=True)
    def careful(tree, scores, random):
        """The greedy rule."""
        return greedy(tree, scores, random)
'''
Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution with the text of a module, which is a plugin."""
    monkeypatch.syspath_prepend(tmp_path)
    (about := tmp_path / "lab_of_mine-1.0.dist-info").mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-of-mine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[drafthead.plugins]\nmine = lab_of_mine\n")

    def install(text: str) -> None:
        (tmp_path / "lab_of_mine.py").write_text(dedent(text))
        waiting_plugins.cache_clear()

    before = [(table, {*table}) for table in (HEADS, DRAFTERS, VERIFIERS)]
    yield install
    for table, names in before:
        for name in {*table} - names:
            del table[name]
    sys.modules.pop("lab_of_mine", None)
    waiting_plugins.cache_clear()


def drafthead(*words: object) -> None:
    given = [str(word) for word in words]
    if error := CliRunner().invoke(build_app(given), given).exception:
        raise error


def test_a_drafter_a_rule_and_a_family_of_another_package_work_in_the_shell(
    install: Install, tmp_path: Path
) -> None:
    install(MODULE)
    write_inputs(tmp_path)
    head = {"family": "mine", "num_heads": 2}
    config = write_run(tmp_path / "mine.yaml", tmp_path, head, {}, {"max_steps": 1})
    drafthead("train", "--config", config, "data.validation=null")
    for draft in ("echo:3", tmp_path / "mine"):
        asked = ("--target", tmp_path / "target", "--draft", draft, "--prompt", "abcd abcd")
        drafthead("generate", *asked, "--max-new-tokens", 4, "--rule", "careful")
        with pytest.raises(UserError, match="known verifiers: auto, careful, greedy"):
            drafthead("generate", *asked, "--rule", "careless")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import not_there", "No module named 'not_there'"),
        (MODULE.replace('"careful"', '"typical"'), "two verifiers are called 'typical'"),
        (MODULE.replace('"echo"', '"lookup"'), "two drafters are called 'lookup'"),
    ],
)
def test_a_plugin_that_fails_is_named_and_left_out(
    install: Install, text: str, reason: str, caplog
) -> None:
    install(text)
    with caplog.at_level(logging.WARNING):
        assert "unheard of" not in VERIFIERS and "typical" in VERIFIERS
    assert f"the plugin lab_of_mine is left out: {reason}" in caplog.messages
