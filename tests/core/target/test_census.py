"""All architectures of `AutoModelForCausalLM`: records of the census, and docs made of them."""

import json
from pathlib import Path

import pytest
from architectures import ARCHITECTURES, STATEFUL
from census import COLUMNS, FILE, counts, tried, works
from stages import more
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).parents[3]
RECORDS = json.loads(FILE.read_text())["records"]
# Of each kind of state one, keys of an indexer, a head behind the norm, and reasons of refusals.
FIRST = (
    *("lfm2", "qwen3_next", "jamba", "mamba2", "recurrent_gemma", "deepseek_v32", "bert"),
    *("modernbert-decoder", "bart", "inkling_text", "xlstm"),
)
TESTED = {*ARCHITECTURES}  # as targets of their own tests


@pytest.mark.parametrize(
    "name",
    [
        n if n in FIRST else more(n)
        for n, r in RECORDS.items()
        if n not in TESTED and "unbuilt" not in r
    ],
)
def test_an_architecture_does_what_its_record_says(name: str) -> None:
    assert tried(name) == RECORDS[name]


def test_the_census_knows_all_names_and_the_docs_say_what_it_found() -> None:
    assert {*RECORDS} == {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert all(works(RECORDS[name]) for name in {*ARCHITECTURES, *STATEFUL} & {*RECORDS})
    page = (ROOT / "docs" / "architectures.md").read_text()
    assert counts(RECORDS) in " ".join(page.split())
    # "Each passes all five tests of the script"
    assert all(RECORDS[name][way] is True for name in STATEFUL for way in COLUMNS)
    count = sum(map(works, RECORDS.values()))
    assert f"[{count} architectures](docs/architectures.md)" in (ROOT / "README.md").read_text()
