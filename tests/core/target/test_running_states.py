"""Targets with a running state: trees on all of them, or a clear refusal."""

import re
from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import STATEFUL, tiny_model
from hidden_answers import generated
from tiny import VOCAB
from transformers import GenerationConfig

from drafthead.core.errors import UserError
from drafthead.core.target.features import NO_FEATURES
from drafthead.core.target.running_states import FUNCTIONS
from drafthead.core.target.state_cache import StateCache, levels_of, parents_of
from drafthead.core.target.target import Target
from drafthead.core.target.weight_state import state_of
from drafthead.core.trees.tree import ancestor_mask
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.layers.own_layer import mtp_layer_of
from drafthead.infer import Decoder
from drafthead.infer.drafters.draft_model import DraftModel
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.engine.prefill import LAST_READ, padded, prefill
from drafthead.infer.serving import ServeRequest
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


# With time steps within limits, which prompts have and single tokens have not.
LIMITED = {
    f"{name}:limited": {**STATEFUL[name], "time_step_limit": (0.02, 0.5)}
    for name in ("mamba2", "bamba", "falcon_h1", "granitemoehybrid")
}
UNLIKE = "zamba2", "nemotron_h", *LIMITED
IN_FLOAT32 = "mamba", "falcon_mamba", "mamba2", "zaya"  # what layers pass on, in any type


def made(name: str, dtype: torch.dtype = torch.float32) -> Target:
    """A small random target."""
    return Target(tiny_model(name, {**STATEFUL, **LIMITED}[name]).to(dtype))


def cache_of(target: Target, *texts: Sequence[int]) -> StateCache:
    """What is kept of texts that are read as prompts."""
    cache, (ids, lengths) = target.new_cache(), padded(texts, target.device)
    prefill(target, ids, lengths, NO_FEATURES, cache, room=8)
    assert isinstance(cache, StateCache)
    return cache


def step(
    target: Target, cache: StateCache, tokens: Sequence[Sequence[int]], parents: Sequence[int]
) -> torch.Tensor:
    """The logits [B, N, V] of a pass over the same tree in each row, after what the cache holds."""
    assert cache.lengths is not None
    visible = ancestor_mask(torch.tensor([parents]))
    places = cache.lengths[:, None] + visible.sum(-1) - 1
    mask = target.tree_mask(cache, visible)
    return target.run(torch.tensor(tokens), places, mask, NO_FEATURES, cache).logits


def check_same(found: StateCache, expected: StateCache) -> None:
    """That texts go on alike from two caches."""
    assert found.lengths is not None and expected.lengths is not None
    assert found.lengths.tolist() == expected.lengths.tolist()
    for mine, theirs in zip(found.running, expected.running, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    for mine, theirs in zip(found.states, expected.states, strict=True):
        for row, length in enumerate(expected.lengths.tolist()):
            columns = (each[row, :, :length] for each in (mine, theirs))
            torch.testing.assert_close(*columns, rtol=1e-3, atol=1e-4)


def prompts_of(*lengths: int) -> list[list[int]]:
    """Random prompts."""
    torch.manual_seed(1)
    return [torch.randint(1, VOCAB, (n,)).tolist() for n in lengths]


@pytest.mark.parametrize("name", first_stage([*STATEFUL, *LIMITED], (*KINDS, "mamba2:limited")))
def test_a_text_goes_on_where_its_tokens_leave_what_a_prompt_leaves(name: str) -> None:
    """A prompt of a second turn has the tokens of an answer, which were read one by one."""
    target, [text] = made(name), prompts_of(12)
    cache = cache_of(target, text[:6])
    for place in range(6, 10):
        step(target, cache, [text[place : place + 1]], [-1])
        cache.commit(torch.zeros(1, 1, dtype=torch.long), torch.tensor([place + 1]), place + 1)
    length = cache.cuttable(11)
    assert length == (6 if name in UNLIKE else 10)
    assert cache.cuttable(5) == 0, "no state was kept there"
    cache.cut(length)
    check_same(cache, cache_of(target, text[:length]))


@pytest.mark.parametrize(("name", "is_alike"), [("lfm2", True), ("zamba2", False)])
def test_all_caches_of_a_target_are_of_one_class(name: str, is_alike: bool) -> None:
    target = made(name)
    first, second = target.new_cache(), target.new_cache()
    assert isinstance(first, StateCache) and first is not second
    assert type(first) is type(second) and first.reads_alike is is_alike


BRANCHED = -1, 0, 0, 1  # a root with two children, of which the first has one


def commit(cache: StateCache, paths: Sequence[Sequence[int]]) -> None:
    """Keep a path of nodes in each row."""
    assert cache.lengths is not None
    counts = torch.tensor([len(path) for path in paths])
    width = max(map(len, paths))
    table = torch.tensor([[*path, *[0] * (width - len(path))] for path in paths])
    lengths = cache.lengths + counts
    cache.commit(table, lengths, int(lengths.max()))


def grown(target: Target) -> tuple[StateCache, list[list[int]], list[list[int]]]:
    """A cache of two rows after two passes over trees, their texts, and those before the last."""
    texts, cache = prompts_of(5, 8), cache_of(target, *prompts_of(5, 8))
    before = texts
    for tokens, paths in (
        ([[3, 4, 5, 6], [7, 8, 9, 10]], ((0, 2), (0, 1, 3))),
        ([[11, 12, 13, 14], [15, 16, 17, 18]], ((0, 1, 3), (0,))),
    ):
        step(target, cache, tokens, BRANCHED)
        commit(cache, paths)
        chosen = [[own[node] for node in path] for own, path in zip(tokens, paths, strict=True)]
        before, texts = texts, [[*old, *new] for old, new in zip(texts, chosen, strict=True)]
    return cache, texts, before


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "qwen3_next", "recurrent_gemma"])
def test_rows_go_on_after_their_own_last_nodes(name: str) -> None:
    """Of branched trees, after two passes; each row also where it was before the last."""
    target = made(name)
    cache, texts, before = grown(target)
    check_same(cache, cache_of(target, *texts))
    for row in (1, 0):
        alone = copy(cache)
        alone.keep_rows(torch.tensor([row]))
        alone.cut(alone.cuttable(len(texts[row]) - 1))
        check_same(alone, cache_of(target, before[row]))


def test_prompts_that_are_read_apart_return_to_their_rows() -> None:
    """In whatever order: the groups here are rows 1, 2 and 0."""
    target, texts = made("lfm2"), prompts_of(100, 3, 60)
    cache, order = target.new_cache(), (1, 2, 0)
    parts = [cache_of(target, texts[row]) for row in order]
    cache.collect(parts, [[row] for row in order], 8)
    for row, text in enumerate(texts):
        alone = copy(cache)
        alone.keep_rows(torch.tensor([row]))
        check_same(alone, cache_of(target, text))


@pytest.mark.parametrize("name", ["lfm2", "mamba2:limited", "zamba2"])
def test_rows_that_join_bring_their_states(name: str) -> None:
    """Where tokens leave others than prompts do, those of the prompts are kept for each row."""
    target = made(name)
    cache, texts, _ = grown(target)
    [late] = prompts_of(7)
    rows = [*texts, late]
    cache.join_rows(cache_of(target, late), [2, 1, 0])
    if name == "lfm2":
        check_same(cache, cache_of(target, *rows[::-1]))
    prompts = [late, *prompts_of(5, 8)[::-1]] if name in UNLIKE else rows[::-1]
    step(target, cache, [[3]] * 3, [-1])
    commit(cache, [(0,)] * 3)
    for row, prompt in enumerate(prompts):
        alone = copy(cache)
        alone.keep_rows(torch.tensor([row]))
        length = alone.cuttable(int(alone.lengths) - (name not in UNLIKE))
        assert length == len(prompt)
        alone.cut(length)
        check_same(alone, cache_of(target, prompt))


@pytest.mark.parametrize("name", first_stage(UNLIKE, ("zamba2",)))
def test_second_turns_are_those_of_transformers(name: str) -> None:
    """In chat and while other requests come and go, of all that tokens leave other states of."""
    target, firsts = made(name), prompts_of(15, 4, 9)
    decoder = Decoder(target, PromptLookup(4))
    decoder.memory.most_kept = 3
    requests = [
        ServeRequest(prompt, id=n, max_new_tokens=(24, 5, 12)[n]) for n, prompt in enumerate(firsts)
    ]
    answers = {answer.id: answer.tokens for answer in decoder.serve(requests, max_rows=2)}
    for number, first in enumerate(firsts):
        second = [*first, *answers[number], 5, 7, 9]
        [answer] = decoder.serve([ServeRequest(second, max_new_tokens=NEW)])
        assert answer.tokens == generated(target.model, second, NEW)
        assert answer.reused in (len(first), len(first) - LAST_READ)


@pytest.mark.parametrize("name", first_stage(STATEFUL, IN_FLOAT32))
def test_the_type_of_published_files_loads_and_draws_heads(name: str, make_head) -> None:
    target = made(name, torch.bfloat16)
    prompt = prompts_of(6)[0]
    head = make_head("medusa", target).to(torch.bfloat16)
    drafted = Decoder(target, drafter_for(head, target)).generate([prompt], max_new_tokens=1)
    logits = target.model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    assert logits[drafted.sequences[0][0]] >= 0.99 * logits.max()


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
        target.check_compilable()


def test_the_docs_name_all_that_work() -> None:
    page = (Path(__file__).parents[3] / "docs" / "architectures.md").read_text()
    table = page[page.index("| `model_type` | state |") : page.index("Each passes all five")]
    first = [line.split("|")[1] for line in table.splitlines()[2:] if line]
    assert sorted(re.findall(r"`(\w+)`", " ".join(first))) == sorted(STATEFUL)


@pytest.mark.parametrize("name", ["qwen3_next", "recurrent_gemma"])
def test_the_model_is_as_it_was_after_a_pass(name: str) -> None:
    target = made(name)
    before = state_of(target.model)
    Decoder(target).generate(prompts_of(5), max_new_tokens=3)
    assert state_of(target.model) == before
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
