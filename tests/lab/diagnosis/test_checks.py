"""Planted faults, each found by its name; a healthy head has none."""

import json
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import byte_tokenizer, tiny_llama

from drafthead.core.target.loading import vocabulary_of
from drafthead.core.target.rounding import to_int8
from drafthead.core.target.target import Target
from drafthead.core.target.weights_hash import weights_fingerprint
from drafthead.heads.base import HEADS, DraftHead
from drafthead.infer import Decoder
from drafthead.lab.diagnosis.checks import CHECKS, planner_of
from drafthead.lab.diagnosis.examination import Examination, Patient, examine
from drafthead.train.data.conversations import read_conversations
from drafthead.train.data.fitted_rows import Reading
from drafthead.train.data.packing import collate
from drafthead.train.data.supervision import Rendering
from drafthead.train.data.token_table import token_table
from drafthead.train.features.reading import read_features

ANSWERS, LENGTH = 10, 60
Change = Callable[[list[int]], list[int]]


def model(seed: int) -> Target:
    """A target of four layers whose greedy text is varied."""
    tokenizer = byte_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 4, **ends}
    return Target(tiny_llama(seed, **sizes), tokenizer)


@pytest.fixture(scope="module")
def target() -> Target:
    return model(seed=0)


def write_answers(
    path: Path,
    target: Target,
    temperature: float = 0.0,
    prompt: Change = list,
    answer: Change = list,
    ends: bool = True,
) -> Path:
    """Answers of the target as distillation writes them; prompts and answers may be changed."""
    assert target.tokenizer is not None
    decoder = Decoder(target)
    decoder.end_ids = frozenset()
    asked = [[{"role": "user", "content": f"tell me of {n} and {n * n}"}] for n in range(ANSWERS)]
    prompts = [prompt(Rendering(target.tokenizer, "").ids(messages, True)) for messages in asked]
    how = {"max_new_tokens": LENGTH, "temperature": temperature, "seed": list(range(ANSWERS))}
    texts, rows = decoder.generate(prompts, **how).sequences, []
    for number, (messages, ids, text) in enumerate(zip(asked, prompts, texts, strict=True)):
        generated = answer(text) + [target.tokenizer.eos_token_id] * ends
        turn = {"prompt": ids, "answer": generated}
        messages.append({"role": "assistant", "content": target.tokenizer.decode(generated)})
        row = {"id": str(number), "messages": messages, "token_ids": [turn]}
        rows.append(row | {"vocabulary": vocabulary_of(target.tokenizer)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained(target: Target, source: Path, family: str, **options: Any) -> DraftHead:
    """A head that knows the answers in a file by heart."""
    torch.manual_seed(0)
    cls = HEADS[family]
    head = cls(cls.sized(cls.config_class(**options), target))
    assert target.tokenizer is not None
    table = token_table(Reading(str(source), None, 256, None), target.tokenizer)
    head.prepare(table.token_counts(target.vocab_size))
    head.initialize(target)
    batch = read_features(target, collate([[s] for s in table]), head.features_needed, "no")
    optimizer = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        (head.train().loss(batch, target).total / batch.supervised.sum()).backward()
        optimizer.step()
    return head.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def healthy(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_answers(tmp_path_factory.mktemp("doctor") / "answers.jsonl", target)


@pytest.fixture(scope="module")
def head(target: Target, healthy: Path) -> DraftHead:
    options = {"taps": (1, 2), "ttt_steps": 3, "depth": 3, "draft_vocab_size": 200, "loss": "hard"}
    return trained(target, healthy, "eagle3", **options)


def seen(target: Target, head: DraftHead, source: Path, **provenance: Any) -> Examination:
    """What an examination sees."""
    assert target.tokenizer is not None
    table = token_table(Reading(str(source), None, 256, None), target.tokenizer)
    conversations = read_conversations(str(source))
    return examine(Patient(target, "target", head, provenance, conversations, table))


@dataclass
class Faults(Mapping[str, str]):
    """What to do, by the name of the fault; only what is asked for is looked for."""

    examination: Examination

    def __getitem__(self, name: str) -> str:
        assert name in CHECKS
        found = CHECKS[name](self.examination)
        if found is None or found.remedy is None:
            raise KeyError(name)
        return found.remedy

    def __iter__(self) -> Iterator[str]:
        return (name for name in CHECKS if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def test_a_healthy_head_has_no_fault(target: Target, head: DraftHead, healthy: Path):
    own = {"target_weights": weights_fingerprint(target), "supervised_tokens": 2_000_000}
    examination = seen(target, head, healthy, **own, evaluation={"tau_chain": 2.0})
    assert not list(Faults(examination))
    looked = {name for name, look in CHECKS.items() if look(examination) is not None}
    assert looked == {*CHECKS} - {"training data among the answers"}, "every check had its say"


def test_a_model_that_did_not_write_the_answers_is_found(
    target: Target, head: DraftHead, tmp_path: Path
):
    found = Faults(seen(target, head, write_answers(tmp_path / "other.jsonl", model(seed=3))))
    assert "the target's own answers" in found["answers of another model"]


def test_sampled_answers_are_told_from_those_of_another_model(
    target: Target, head: DraftHead, tmp_path: Path
):
    source = write_answers(tmp_path / "sampled.jsonl", target, temperature=1.0)
    found = Faults(seen(target, head, source))
    assert "answers of another model" not in found
    assert "greedy answers" in found["answers sampled at a temperature"]


@pytest.mark.parametrize("change", [lambda ids: ids[:1] + ids, lambda ids: ids[:-1]])
def test_prompts_of_another_template_are_found(
    target: Target, head: DraftHead, tmp_path: Path, change: Change
):
    """A beginning that is there twice; a prompt that does not ask for an answer."""
    source = write_answers(tmp_path / "prompts.jsonl", target, prompt=change)
    assert "another chat template" in Faults(seen(target, head, source))


def test_a_date_of_another_day_is_no_other_template(
    target: Target, head: DraftHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert target.tokenizer is not None
    dated = "{{ strftime_now('%d %b %Y') }}" + str(target.tokenizer.chat_template)
    monkeypatch.setattr(target.tokenizer, "chat_template", dated)
    then = type("Clock", (), {"now": staticmethod(lambda: datetime(2026, 1, 9))})
    with monkeypatch.context() as patch:
        patch.setattr("transformers.utils.chat_template_utils.datetime", then)
        source = write_answers(tmp_path / "dated.jsonl", target)
        other = write_answers(tmp_path / "other.jsonl", target, prompt=lambda ids: ids[:-1])
    assert "another chat template" not in Faults(seen(target, head, source))
    assert "another chat template" in Faults(seen(target, head, other))


@pytest.mark.parametrize("shift", [-1, 1])
def test_taps_beside_the_right_ones_are_found(
    target: Target, head: DraftHead, healthy: Path, shift: int
):
    off = trained_copy(head, taps=tuple(tap + shift for tap in head.config.taps))
    assert "set the taps to [1, 2]" in Faults(seen(target, off, healthy))["taps of other layers"]


def trained_copy(head: DraftHead, **changes: Any) -> DraftHead:
    """A head's weights under another configuration."""
    other = type(head)(replace(head.config, **changes))
    other.load_state_dict(head.state_dict())
    return other.eval().requires_grad_(False)


def test_a_draft_vocabulary_of_ids_instead_of_differences_is_found(
    target: Target, head: DraftHead, healthy: Path
):
    examination = seen(target, head, healthy)
    damaged = trained_copy(head)
    damaged.d2t.copy_(damaged.draft_ids)
    patient = replace(examination.patient, head=damaged)
    assert "damaged draft vocabulary" in Faults(replace(examination, patient=patient))


def test_a_draft_vocabulary_of_other_text_is_found(target: Target, head: DraftHead, healthy: Path):
    torch.manual_seed(0)
    cls = HEADS["eagle3"]
    other = cls(cls.sized(cls.config_class(draft_vocab_size=40), target))
    other.prepare((torch.arange(target.vocab_size) >= 200).long())
    other.initialize(target)
    assert "tokens outside the draft vocabulary" in Faults(seen(target, other, healthy))


def test_answers_without_an_end_are_found(target: Target, head: DraftHead, tmp_path: Path):
    source = write_answers(tmp_path / "cut.jsonl", target, ends=False)
    assert "answers that were cut" in Faults(seen(target, head, source))


def test_loops_are_found(target: Target, head: DraftHead, tmp_path: Path):
    source = write_answers(tmp_path / "loops.jsonl", target, answer=lambda ids: ids[:10] * 6)
    assert "answers that repeat themselves" in Faults(seen(target, head, source))


def test_answers_that_were_trained_on_are_found(target: Target, head: DraftHead, healthy: Path):
    settings = {"data": {"train": str(healthy), "max_length": 256}}
    found = Faults(seen(target, head, healthy, settings=settings))
    assert str(healthy) in found["training data among the answers"]
    gone = {"data": {"train": "gone.jsonl", "max_length": 256}}
    assert "training data among the answers" not in Faults(
        seen(target, head, healthy, settings=gone)
    )


def test_a_head_of_another_target_is_found(target: Target, head: DraftHead, healthy: Path):
    found = Faults(seen(target, head, healthy, target_weights=weights_fingerprint(model(seed=3))))
    assert "another target" in found


def test_a_target_of_whole_numbers_is_found(target: Target, head: DraftHead, healthy: Path):
    examination = seen(target, head, healthy)
    rounded = Target(deepcopy(target.model), target.tokenizer)
    to_int8(rounded.model)
    patient = replace(examination.patient, target=rounded)
    assert "another target" in Faults(replace(examination, patient=patient))


def test_answers_of_another_kind_are_found(target: Target, head: DraftHead, healthy: Path):
    found = Faults(seen(target, head, healthy, evaluation={"tau_chain": 9.0}))
    assert "another kind" in found["too little training, or too much"]


def test_too_little_training_is_found(target: Target, healthy: Path):
    torch.manual_seed(0)
    cls = HEADS["eagle3"]
    fresh = cls(cls.sized(cls.config_class(), target))
    found = Faults(seen(target, fresh, healthy, supervised_tokens=1000))
    assert "train on more answers" in found["too little training, or too much"]


def test_too_little_training_is_found_however_long_the_chains_are(target, head, healthy):
    few, many = (
        Faults(seen(target, head, healthy, supervised_tokens=tokens))
        for tokens in (999_999, 1_000_000)
    )
    assert "train on more answers" in few["too little training, or too much"]
    assert "too little training, or too much" not in many


def test_the_depth_at_which_guesses_fail_is_found(target: Target, head: DraftHead, healthy: Path):
    examination = seen(target, head, healthy)
    worse = replace(examination.evaluation, alpha=(0.8, 0.7, 0.2))
    remedy = Faults(replace(examination, evaluation=worse))["depth at which acceptance falls"]
    assert "depth_decay" in remedy


def test_a_planner_that_decodes_plainly_is_found(target: Target, head: DraftHead, healthy: Path):
    patient = seen(target, head, healthy).patient
    head.path_counts = {(): 1000, (0,): 1}
    try:
        found = planner_of(patient)
    finally:
        head.path_counts = None
    assert found.is_fault and "plain decoding" in found.evidence
