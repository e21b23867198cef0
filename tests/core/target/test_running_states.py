"""Targets with a running state: trees on all of them, or a clear refusal."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import STATEFUL, tiny_model
from hidden_answers import generated
from tiny import VOCAB
from transformers import GenerationConfig

from drafthead.core.errors import UserError
from drafthead.core.target.running_states import FUNCTIONS
from drafthead.core.target.state_cache import StateCache, levels_of, parents_of
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import ancestor_mask
from drafthead.heads.layers.own_layer import mtp_layer_of
from drafthead.infer import Decoder
from drafthead.infer.drafters.draft_model import DraftModel
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.engine.prefill import LAST_READ
from drafthead.train.draft_models.student import DraftModelConfig, Student

NEW = 16
# One of each kind of state: convolution, delta rules, Mamba 1 and 2, with attention and without.
KINDS = (
    *("lfm2", "qwen3_next", "kimi_linear", "jamba", "zamba2", "mamba2"),
    *("recurrent_gemma", "minimax", "zaya", "zamba"),
)


def first_stage(names: Iterable[str], first: Sequence[str]) -> list[Any]:
    """Names as parameters, of which all but the first ones wait for the second stage."""
    marks = pytest.mark.thorough
    return [name if name in first else pytest.param(name, marks=marks) for name in names]


def made(name: str) -> Target:
    """A small random target."""
    return Target(tiny_model(name, STATEFUL[name]))


def prompts_of(*lengths: int) -> list[list[int]]:
    """Random prompts."""
    torch.manual_seed(1)
    return [torch.randint(1, VOCAB, (n,)).tolist() for n in lengths]


@pytest.mark.parametrize("name", first_stage(KINDS, ("lfm2", "qwen3_next", "recurrent_gemma")))
def test_prompts_in_chunks_are_answered_as_those_that_are_read_at_once(name: str) -> None:
    target = made(name)
    # RecurrentGemma's `generate` begins prompts of one token after those of the call before.
    prompts = prompts_of(30, 2 if name == "recurrent_gemma" else 1, 14)
    answers = [generated(target.model, prompt, NEW) for prompt in prompts]
    decoder = Decoder(target, PromptLookup(4))
    for chunk in (1, 4, 29):
        config = GenerationConfig(prefill_chunk_size=chunk)
        result = decoder.generate(prompts, max_new_tokens=NEW, generation_config=config)
        assert result.sequences == answers, chunk


@pytest.mark.parametrize("name", first_stage(KINDS, ("lfm2", "mamba2", "recurrent_gemma")))
def test_what_a_prompt_begins_with_is_read_once(name: str) -> None:
    target = made(name)
    [start, *ends] = prompts_of(20, 5, 7)
    decoder = Decoder(target, PromptLookup(4))
    prompts = [[*start, *end] for end in ([], *ends)]
    # First: RecurrentGemma's layers hold what `generate` left, and a model that differs reads anew.
    expected = [generated(target.model, prompt, NEW) for prompt in prompts]
    decoder.remember(start)
    for prompt, answer in zip(prompts, expected, strict=True):
        result = decoder.generate(prompt, max_new_tokens=NEW)
        assert result.sequences == [answer]
        assert result.stats.reused == len(start) - LAST_READ
    other = [*start[:-3], 1, 2, 3]  # no state was kept there
    assert decoder.generate(other, max_new_tokens=NEW).stats.reused == 0


@pytest.mark.parametrize("name", first_stage(KINDS, ("lfm2", "qwen3_next", "minimax")))
def test_beams_carry_the_states_of_those_that_they_descend_from(name: str) -> None:
    target = made(name)
    prompts = prompts_of(6, 11)
    decoder = Decoder(target, PromptLookup(3))
    result = decoder.generate(prompts, max_new_tokens=8, num_beams=3)
    # Without a cache: those of RecurrentGemma and MiniMax keep the states of other beams.
    options = {"num_beams": 3, "use_cache": False}
    expected = [generated(target.model, prompt, 8, **options) for prompt in prompts]
    assert result.sequences == expected


@pytest.mark.parametrize("name", first_stage(KINDS, ("lfm2", "qwen3_next", "mamba2")))
def test_a_draft_model_may_carry_a_state_as_well(name: str) -> None:
    target = made("lfm2")
    prompts = prompts_of(6, 11, 8)
    drafter = DraftModel(made(name), target, 3)
    for budget in drafter.budgets[2], drafter.budgets[-1]:  # a tree, a chain
        decoder = Decoder(target, drafter, budget)
        expected = [generated(target.model, prompt, NEW) for prompt in prompts]
        assert decoder.generate(prompts, max_new_tokens=NEW).sequences == expected
    own = DraftModel(made(name), made(name), 3)
    accepted = Decoder(made(name), own, own.budgets[-1]).generate(prompts, max_new_tokens=NEW)
    assert accepted.stats.tau > 3, "its own target accepts all"


def test_a_state_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateCache, "_go_on_from", lambda *_: None)
    with pytest.raises(UserError, match=r"a tree's logits differ by \d+\.\d% from those of single"):
        made("lfm2")
    with pytest.raises(UserError, match=r"a tree's logits differ by \d+\.\d% from those of single"):
        made("minimax")
    monkeypatch.undo()
    monkeypatch.setitem(FUNCTIONS, "mamba2_selective_state_update", lambda *_: torch.add)
    with pytest.raises(UserError, match="cannot go on from a running state"):
        made("mamba2")
    monkeypatch.undo()
    follow = StateCache.follow

    def of_siblings(self: StateCache, step: object) -> object:
        assert self.parents is not None
        self.parents = self.parents.clamp_max(1)
        return follow(self, step)  # type: ignore[arg-type]

    monkeypatch.setattr(StateCache, "follow", of_siblings)
    with pytest.raises(UserError, match=r"a tree's logits differ by \d+\.\d% from those of single"):
        made("qwen3_next")


def test_what_states_do_not_go_with_is_refused_by_name() -> None:
    target = made("lfm2")
    with pytest.raises(UserError, match="some of its layers is not available for Lfm2ForCausalLM"):
        Decoder.from_pretrained(target, draft="layers:0-1")
    with pytest.raises(
        UserError, match="cut out of the target is not available for Lfm2ForCausalL"
    ):
        Student.sized(DraftModelConfig(), target)
    pure = made("mamba")
    with pytest.raises(UserError, match="mamba has no MTP layer: none of its layers attends"):
        mtp_layer_of(pure.config)
    with pytest.raises(UserError, match="compile is not available for Lfm2ForCausalLM: its layers"):
        Decoder.from_pretrained(target, compile=True)


def test_the_docs_name_all_that_work() -> None:
    page = (Path(__file__).parents[3] / "docs" / "architectures.md").read_text()
    table = page[page.index("| `model_type` | state |") : page.index("Each passes all five")]
    first = [line.split("|")[1] for line in table.splitlines()[2:] if line]
    assert sorted(re.findall(r"`(\w+)`", " ".join(first))) == sorted(STATEFUL)


def test_the_model_is_as_it_was_after_a_pass() -> None:
    target = made("qwen3_next")
    Decoder(target).generate(prompts_of(5), max_new_tokens=3)
    assert not [part for part in target.model.modules() if "forward" in vars(part)]


def test_parents_and_levels_of_a_tree() -> None:
    visible = ancestor_mask(torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]]))
    assert parents_of(visible).tolist() == [[0, 1, 1, 2], [0, 1, 2, 3]]
    pending = torch.ones(1, 2, 1, dtype=torch.bool)  # both see a node that was read before
    after = torch.cat([pending, torch.eye(2, dtype=torch.bool)[None]], dim=2)
    assert parents_of(after).tolist() == [[1, 1]]
    levels = levels_of(visible.sum(-1) - 1, rows=2)
    assert [level.tolist() for level in levels] == [
        [[0], [0]],
        [[1, 2], [1, 0]],
        [[3], [2]],
        [[0], [3]],
    ]
