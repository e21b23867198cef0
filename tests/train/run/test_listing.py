"""All settings of a run are listed, with what their declarations say."""

from dataclasses import fields
from pathlib import Path

from drafthead.heads.base import HEADS
from drafthead.train.run.config import SECTIONS
from drafthead.train.run.listing import listed, table

PAGE = Path(__file__).parents[3] / "docs" / "training.md"


def test_the_page_has_the_table_of_all_settings() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), f"docs/training.md needs:\n{table()}"


def test_every_setting_of_a_family_is_listed_once(family: str) -> None:
    sections = {"head": HEADS[family].config_class, **SECTIONS}
    names = [f"{section}.{each.name}" for section, cls in sections.items() for each in fields(cls)]
    assert [each.name for each in listed(family)] == names


def test_a_setting_has_its_default_bounds_and_comments(drafthead) -> None:
    status, out, _ = drafthead("train", "--settings", "eagle3")
    assert status == 0
    for text in (
        "head.depth: 5\n    integer ≥1; tokens drafted after the root\n",
        "train.output: required\n    text; folder of the run\n",
        "data.validation_share: null\n    number >0 <1 or null; Share of the",
        'optimizer.schedule: "cosine"\n    constant, linear, cosine; ',
    ):
        assert text in out
    assert drafthead("train", "--settings", "nothing")[0] == 2
