"""The first configuration of a run, fitted to a target. conftest.py gives the families."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from tiny import write_target

from drafthead.core.errors import UserError
from drafthead.train.run.config import load_run_config
from drafthead.train.run.starting_config import fitted, with_value, write_starting_config

TEMPLATE = """# A head.
# More about this file.
target:
  name: MODEL # a model
head:
  draft_vocab_size: 1
data:
  max_length: 1
optimizer:
  name: muon
"""


def settings(hidden_size: int, vocab_size: int, context: int | None) -> dict[str, str]:
    sizes = SimpleNamespace(
        hidden_size=hidden_size, vocab_size=vocab_size, max_position_embeddings=context
    )
    lines = [line.partition(": ") for line in fitted(TEMPLATE, "mine", sizes).splitlines()]
    return {key.strip(): value for key, _, value in reversed(lines)}


def test_a_family_has_a_file_that_trains_it(trainable_family: str, tmp_path: Path):
    target = tmp_path / "target"
    write_target(target, max_position_embeddings=128)
    path = tmp_path / "runs" / "mine.yaml"
    write_starting_config(trainable_family, str(target), path)
    config = load_run_config(path)
    assert (config.family, config.target.name) == (trainable_family, str(target))
    assert config.data.max_length == 128  # the target's context
    assert getattr(config.head, "draft_vocab_size", 0) == 0  # a small vocabulary is guessed whole


def test_rows_and_draft_vocabulary_grow_with_the_target():
    small = settings(hidden_size=576, vocab_size=49_152, context=8192)
    large = settings(hidden_size=4096, vocab_size=128_256, context=131_072)
    assert (small["draft_vocab_size"], small["max_length"]) == ("8192", "512")
    assert (large["draft_vocab_size"], large["max_length"]) == ("32768", "2048")
    assert settings(hidden_size=4096, vocab_size=32_000, context=None)["draft_vocab_size"] == "0"


def test_the_target_is_named_and_the_optimiser_keeps_its_name():
    sizes = SimpleNamespace(hidden_size=64, vocab_size=100, max_position_embeddings=64)
    text = fitted(TEMPLATE, "mine", sizes)
    assert text.startswith("# A head.\ntarget:\n  name: mine # a model\n")
    assert text.endswith("optimizer:\n  name: muon\n")


def test_a_setting_gets_another_value_and_keeps_its_comment():
    assert with_value("x:\n  a: 1 # so\n  b: 1\n", "a", 2) == "x:\n  a: 2 # so\n  b: 1\n"


@pytest.mark.parametrize("name", ["C: #1", "a b", "yes", "- x", "x" * 200])
def test_any_name_of_a_target_is_read_back(name: str):
    sizes = SimpleNamespace(hidden_size=64, vocab_size=100, max_position_embeddings=64)
    assert yaml.safe_load(fitted(TEMPLATE, name, sizes))["target"]["name"] == name


def test_what_cannot_be_written_is_said(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    with pytest.raises(UserError, match="unknown head family 'medusas'"):
        write_starting_config("medusas", "x", path)
    with pytest.raises(UserError, match=r"no/such/model.*does not exist"):
        write_starting_config("medusa", "no/such/model", path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=f"cannot read the sizes of {tmp_path}"):
        write_starting_config("medusa", str(tmp_path), path)
    path.write_text("mine")
    with pytest.raises(UserError, match=r"mine.yaml exists already"):
        write_starting_config("medusa", "x", path)
    assert path.read_text() == "mine"
