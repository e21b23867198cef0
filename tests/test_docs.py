"""README.md and docs/: links lead somewhere, Python runs, and pages are few words."""

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import yaml

from drafthead.core.target.target import Target
from drafthead.heads.base import HEADS, DraftHead
from drafthead.infer import Decoder
from drafthead.infer.loading.loaded import head_drafter
from drafthead.infer.verifiers import VERIFIERS

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "assets").glob("*/*.md")]
DOCS = sorted((ROOT / "docs").glob("*.md"))
BENCHMARKS = ROOT / "benchmarks"
MOST_WORDS = 22_000  # of all pages in docs/
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
ANCHOR = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]+)\)")
FILE = re.compile(  # in code quotes
    r"`((?:assets|backends|benchmarks|configs|contrib|docs|heads|infer|lab|scripts|tests|train)/[\w/.-]+\.\w+)`"
)
PROMPT = [3, 9, 4, 12]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_no_missing_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {page.parent / link for link in LINK.findall(text)}
    named |= {ROOT / path for path in FILE.findall(text)}
    assert not [str(path) for path in named if not path.exists()]


def test_a_page_names_each_file_of_measurements() -> None:
    """So nobody keeps numbers that nothing rests on."""
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    of_gpus = (BENCHMARKS / "gpu" / "README.md").read_text(encoding="utf-8")

    def is_named(file: Path) -> bool:
        own = of_gpus if file.parent.name == "gpu" else ""
        return f"{file.parent.name}/{file.name}" in pages or f"`{file.name}`" in own

    assert not [str(file) for file in BENCHMARKS.rglob("*.json") if not is_named(file)]


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs name them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_to_a_heading_finds_it(page: Path) -> None:
    links = [
        (page.parent / file if file else page, anchor)
        for file, anchor in ANCHOR.findall(page.read_text(encoding="utf-8"))
    ]
    assert not [(str(to), anchor) for to, anchor in links if anchor not in anchors_of(to)]


def test_the_site_has_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = re.findall(r"[\w.]+\.md", str(nav))
    assert sorted(listed) == [page.name for page in DOCS]


def test_the_pages_can_be_read_in_an_afternoon() -> None:
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in DOCS) <= MOST_WORDS


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda page: page.name)
def test_the_code_of_a_page_can_be_parsed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("```") % 2 == 0
    for language, code in re.findall(r"```(python|yaml)\n(.*?)```", text, re.DOTALL):
        compile(code, page.name, "exec") if language == "python" else yaml.safe_load(code)


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
        shipped = '"smollm2", draft=["smollm2-eagle3", "lookup"]'
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


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda p: p.name)
def test_the_texts_of_a_picture_are_words_in_their_panel(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    lines = [float(line.get("x1", 0)) for line in root.iter(f"{SVG}line")]
    borders = [*lines, float(root.get("viewBox", "").split()[2])]
    for text in root.iter(f"{SVG}text"):
        words, x = text.text or "", float(text.get("x", 0))
        size = float(text.get("font-size", root.get("font-size", 16)))
        width = len(words) * size * (0.5 if "sans" in text.get("font-family", "") else 0.61)
        left = x - width / 2 if text.get("text-anchor") == "middle" else x
        border = min(each for each in borders if each > left)
        assert left >= 0 and left + width <= border, f"{words!r} crosses a border"
        assert not re.search(r"quot;|amp;|(\w+ \w+ \w+).*\1", words), words
