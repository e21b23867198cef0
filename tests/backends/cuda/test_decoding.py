"""Whole answers by recorded passes with the tree kernel, which Triton's interpreter runs."""

from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, tiny_model
from rehearsal import rehearse
from stages import more
from tiny import END, random_prompts, tiny_llama
from transformers import GenerationConfig

import drafthead.infer.decoder  # noqa: F401  (registers the families)
from drafthead.backends.cuda import recorded_target as module
from drafthead.backends.cuda import registration
from drafthead.backends.cuda.recorded_target import RecordedTarget
from drafthead.core.drafting.drafter import Drafter
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget
from drafthead.heads.base import HEADS
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.infer.decoder import Decoder
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.lab.exactness.oracle import OracleDecoder

TOKENS = 6


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch) -> None:
    """Passes are recorded by a stand-in, and read trees with the kernel."""
    rehearse(monkeypatch)
    monkeypatch.setattr("rehearsal.WARM_UPS", 1)  # an interpreter takes seconds for each


def compiled_target(target: Target) -> RecordedTarget:
    compiled = RecordedTarget(target)
    compiled.kernels = compiled._tree_kernels()
    assert compiled.kernels is not None
    return compiled


def eagle(target: Target) -> Drafter:
    cls = HEADS["eagle3"]
    torch.manual_seed(0)
    config = cls.config_class(num_layers=1, depth=3, ttt_steps=3, draft_vocab_size=20)
    head = cls(cls.sized(config, target))
    head.prepare(torch.arange(target.vocab_size))
    head.initialize(target)
    head.path_counts = {(): 100, (0,): 60, (0, 0): 40, (0, 0, 0): 30}
    return drafter_for(head.eval().requires_grad_(False), target)


@pytest.mark.parametrize("name", ["eagle3", more("prompt-lookup")])
def test_text_and_drafts_are_those_of_uncompiled_passes(name: str, monkeypatch) -> None:
    """One recording of a head's draft serves all lengths: it is given no numbers of columns."""
    target = Target(tiny_llama(0, eos_token_id=END, pad_token_id=0))
    task = {"prompts": random_prompts(2), "max_new_tokens": TOKENS}
    expected = OracleDecoder(target).generate(**task).sequences
    compiled = compiled_target(target)
    drafter = {"eagle3": eagle(target), "prompt-lookup": PromptLookup(3)}[name]
    budget = Budget(8, 3) if name == "eagle3" else None
    eager = Decoder(target, drafter, budget).generate(**task)
    drafter.compile(compiled)
    lengths = []
    if name == "eagle3":
        draft = drafter.read_and_grow

        def noting(*arguments: Any) -> Any:
            view, room = arguments[4:6]
            lengths.extend([len(view.room.seen), len(room.seen)])
            return recorded(*arguments)

        recorded = drafter.whole(draft)
        drafter.called[draft, "record"] = noting
    found = Decoder(compiled, drafter, budget).generate(**task)
    assert found.sequences == eager.sequences == expected
    assert found.stats.accept_lengths == eager.stats.accept_lengths
    assert {*lengths} == ({0} if name == "eagle3" else set())


@pytest.mark.parametrize(("kind", "without_masks"), [("llama", True), ("mistral", False)])
def test_later_parts_of_prompts_are_read_without_masks_where_nothing_is_out_of_reach(
    kind: str, without_masks: bool, monkeypatch
) -> None:
    target = Target(tiny_model(kind, ARCHITECTURES[kind]))
    prompts, chunks = random_prompts(2), GenerationConfig(prefill_chunk_size=3)
    expected = OracleDecoder(target).generate(prompts, max_new_tokens=1).sequences
    later, attend = [], registration.scaled_dot_product_attention
    monkeypatch.setattr(
        registration,
        "scaled_dot_product_attention",
        lambda *states, attn_mask, **how: (
            later.append((attn_mask.seq_len_q, attn_mask.seq_len_kv))
            or attend(*states, attn_mask=attn_mask, **how)
        ),
    )
    decoder = Decoder(compiled_target(target))
    later.clear()
    found = decoder.generate(prompts, max_new_tokens=1, generation_config=chunks).sequences
    assert found == expected
    longest = max(map(len, prompts))
    ends = [(min(3, longest - start), min(start + 3, longest)) for start in range(3, longest, 3)]
    assert sorted(set(later)) == (ends if without_masks else [])


@pytest.mark.parametrize("name", [None, more("eagle3")])
def test_a_short_prompt_is_read_by_one_recording_whatever_its_length(name, monkeypatch) -> None:
    monkeypatch.setattr(module, "OF_A_TREE", 4)
    rehearsal = rehearse(monkeypatch)
    target = Target(tiny_llama(0, eos_token_id=END, pad_token_id=0))
    drafter = eagle(target) if name else None
    task, recorded = {"max_new_tokens": 3}, []
    compiled = compiled_target(target)
    if drafter is not None:
        drafter.compile(compiled)
    decoder = Decoder(compiled, drafter)
    passed, _ = Target.passed, compiled.one_token  # which tells the sizes of a cache
    for prompt in (list(range(8, 17)), list(range(20, 24)), list(range(30, 41))):
        expected = OracleDecoder(target).generate([prompt], **task).sequences
        monkeypatch.setattr(Target, "passed", None)  # no pass over the prompt as it is
        assert decoder.generate([prompt], **task).sequences == expected
        monkeypatch.setattr(Target, "passed", passed)
        recorded.append(rehearsal.recorded)
    if drafter is None:  # a draft is recorded for how much is new
        assert recorded == [2, 2, 2], "a part of a prompt, and a step"


def test_a_model_that_attends_in_another_way_is_left_with_masks() -> None:
    target = Target(tiny_llama(0, attn_implementation="eager"))
    assert RecordedTarget(target)._tree_kernels() is None
