"""README.md and docs/: pages name files that exist, and their Python runs."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from drafthead.core.target.target import Target
from drafthead.heads.base import HEADS, DraftHead
from drafthead.infer import Decoder
from drafthead.infer.loaded import head_drafter
from drafthead.infer.verifiers import VERIFIERS

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "assets").glob("*/*.md")]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
FILE = re.compile(  # in code quotes
    r"`((?:assets|backends|benchmarks|configs|contrib|docs|heads|infer|lab|scripts|tests|train)/[\w/.-]+\.\w+)`"
)
PROMPT = [3, 9, 4, 12]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_no_missing_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {page.parent / link for link in LINK.findall(text)}
    named |= {ROOT / path for path in FILE.findall(text)}
    assert not [str(path) for path in named if not path.exists()]


def python_of(page: str) -> list[str]:
    """The Python blocks of a page, in order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    """What a page registers is forgotten after its test."""
    known = [(registry, set(registry)) for registry in (HEADS, VERIFIERS)]
    yield
    for registry, names in known:
        for name in registry.keys() - names:
            del registry[name]


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_python_of_a_page_runs(page: str) -> None:
    scope: dict[str, object] = {}
    for block in python_of(page):
        # Plain decoding, as nothing is trained, of a model that needs no network.
        block = block.replace(', draft="runs/demo/head"', "")
        shipped = '"smollm2", draft=["assets/smollm2_eagle3", "lookup"]'
        block = block.replace(shipped, '"assets/demo_target"')
        exec(block.replace("max_new_tokens=64", "max_new_tokens=4"), scope)
    assert isinstance(scope.get("decoder"), Decoder), "the page shows how to make a decoder"


def test_the_head_of_the_docs_drafts(target: Target) -> None:
    exec(python_of("docs/adding_a_head.md")[0], {"__name__": "residual"})
    torch.manual_seed(0)
    cls: type[DraftHead] = HEADS["residual"]
    head = cls(cls.sized(cls.config_class(), target))
    head.initialize(target)
    decoder = Decoder(target, head_drafter(head.eval(), target))
    answer = decoder.generate([PROMPT], max_new_tokens=12).sequences
    assert answer == Decoder(target).generate([PROMPT], max_new_tokens=12).sequences


def test_the_verifier_of_the_docs_takes_longer_steps(target: Target, make_drafter) -> None:
    rule, use = python_of("docs/adding_a_verifier.md")
    exec(rule, {"__name__": "near"})
    exec(use, {})
    decoder = Decoder(target, make_drafter("draft-model", target))
    greedy = decoder.generate([PROMPT], max_new_tokens=40)
    near = decoder.generate([PROMPT], max_new_tokens=40, verifier="near")
    assert near.stats.tau >= greedy.stats.tau
