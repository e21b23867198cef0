"""Drafters by name: what `Decoder.from_pretrained(target, draft=...)` makes of names and paths."""

import json
from pathlib import Path

import pytest
import torch
from tiny import tiny_llama

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.heads.formats.drafthead import save_head
from drafthead.infer import Decoder
from drafthead.infer.drafters.draft_model import DraftModel
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.drafters.with_lookup import WithLookup
from drafthead.infer.loading.loaded import (
    DRAFTERS,
    Fitting,
    kind_of_path,
    register_drafter,
    tell_of_nothing_to_compile,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a draft model."""
    folder = tmp_path_factory.mktemp("drafters")
    tiny_llama(seed=1).save_pretrained(folder / "model")
    return folder


@pytest.fixture
def head(tmp_path: Path, target: Target, make_head) -> Path:
    save_head(make_head("medusa", target), tmp_path / "head", target, None, {})
    return tmp_path / "head"


def described(decoder: Decoder) -> str:
    """The kinds of drafters, and what is beside them."""
    drafter = decoder.drafter
    if isinstance(drafter, WithLookup):
        return f"{type(drafter.drafter).__name__} + {type(drafter.lookup).__name__}"
    return type(drafter).__name__


def test_paths_are_recognised(target: Target, folder: Path, head: Path) -> None:
    model, named = folder / "model", f"model:{folder / 'model'}"
    for draft, expected in [
        (None, "NoneType"),
        ((), "NoneType"),
        (head, "MedusaDrafter"),
        (str(head), "MedusaDrafter"),
        (f"head:{head}", "MedusaDrafter"),
        (model, "DraftModel"),
        (named, "DraftModel"),
        ("lookup", "PromptLookup"),
        ("answers", "StoreLookup"),
        ("layers:0", "OwnLayers"),
        (("lookup", "answers"), "StoreLookup"),
        ((head, "lookup"), "MedusaDrafter + PromptLookup"),
        (("answers", named, "lookup"), "DraftModel + StoreLookup"),
    ]:
        found = described(Decoder.from_pretrained(target, draft))
        assert found == expected, draft


def test_an_adapters_folder_is_a_model(tmp_path: Path) -> None:
    """It holds no configuration of a model, but the name of one."""
    config = json.dumps({"base_model_name_or_path": "owner/model"})
    (tmp_path / "adapter_config.json").write_text(config)
    assert kind_of_path(tmp_path) == "model"


def test_a_drafter_is_taken_as_it_is(target: Target) -> None:
    own = PromptLookup(3)
    assert Decoder.from_pretrained(target, own).drafter is own
    model = DraftModel(Target(tiny_llama(seed=2)), target, 2)
    drafter = Decoder.from_pretrained(target, [own, model]).drafter
    assert isinstance(drafter, WithLookup) and drafter.drafter is model


@pytest.mark.parametrize(
    ("draft", "complaint"),
    [
        ("nothing", r"does not exist.*--draft takes .*head:PATH, .*lookup.*, smollm2-eagle3"),
        ("lokup", "lokup does not exist; did you mean lookup"),
        ("smolm2-eagle3", "smolm2-eagle3 does not exist; did you mean smollm2-eagle3"),
        (5, "got 5: names are"),
        (["lookup", 5], "got 5: names are"),
        (["head:a", "layers:0"], "choose one of head:a and layers:0 to draft: only lookup, "),
        (["lookup", "lookup"], "lookup is given twice"),
        ("lookup:5", "is not a drafter"),
        ("head:", "is not a drafter"),
    ],
)
def test_what_does_not_go_together_is_refused(target: Target, draft, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Decoder.from_pretrained(target, draft)


@pytest.mark.parametrize("draft", [None, "answers", ["head:a", "lookup"]])
def test_a_length_that_nothing_uses_is_refused(target: Target, draft) -> None:
    with pytest.raises(UserError, match="draft_tokens is for draft models, own layers and lookup"):
        Decoder.from_pretrained(target, draft, draft_tokens=3)


def test_a_kind_of_drafter_can_be_added(target: Target) -> None:
    @register_drafter("repeat", "TOKENS")
    def repeat(argument: str, fitting: Fitting) -> PromptLookup:
        return PromptLookup(int(argument))

    try:
        decoder = Decoder.from_pretrained(target, "repeat:7")
        assert isinstance(decoder.drafter, PromptLookup) and decoder.drafter.depth == 7
        with pytest.raises(ValueError, match="two drafters are called 'repeat'"):
            register_drafter("repeat")(repeat)
    finally:
        del DRAFTERS["repeat"]


@pytest.mark.parametrize("draft", [None, "lookup", "layers:0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compile_changes_nothing_on_a_cpu_and_says_so(dtype, draft, caplog) -> None:
    """With our kernels and without; one sentence says what the option is for."""
    tell_of_nothing_to_compile.cache_clear()
    model = tiny_llama(hidden_size=128).to(dtype)
    usual, asked = (Decoder.from_pretrained(model, draft, compile=how) for how in (None, True))
    (line,) = caplog.messages
    assert line.startswith("compile changes nothing on a CPU: it is for GPUs")
    assert type(asked.target) is type(usual.target) and not asked.target.backend.records
    found, expected = (each.generate([9, 10, 9], max_new_tokens=12) for each in (asked, usual))
    assert found.sequences == expected.sequences
