"""Decoding from several threads at once: every answer is the one that is given alone."""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from rehearsal import rehearse
from tiny import byte_tokenizer, tiny_llama
from transformers import BloomConfig, BloomForCausalLM

from drafthead.backends.cuda.recorded_target import RecordedTarget
from drafthead.core.target.target import Target
from drafthead.infer.decoder import Decoder
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.timing.plans import StepKind
from drafthead.lab.exactness.oracle import OracleDecoder

THREADS = 3
Answer = Callable[[Any], Any]  # the new tokens after a prompt


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(8, 64, (n,), generator=generator).tolist() for n in lengths]


# Of one length another thread's answer looks right; of several, its states do not even fit.
PROMPTS = {
    "equal": prompts_of(8, 8, 8, 8, 8, 8, 8, 8),
    "different": prompts_of(3, 8, 5, 13, 1, 6, 11, 9),
}


@pytest.fixture(autouse=True)
def threads_take_turns_often() -> Iterator[None]:
    """Python changes threads every 10 us instead of every 5 ms."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def all_at_once(answers: Sequence[Answer], prompts: list[Any], rounds: int) -> list[Any]:
    """Pairs of prompts and answers, or exceptions: a thread for each of `answers` asks all prompts.

    It does so `rounds` times; each thread begins with another prompt.
    """
    start = Barrier(len(answers))

    def work(number: int) -> list[tuple[Any, Any]]:
        start.wait()
        pairs = []
        for place in range(rounds * len(prompts)):
            prompt = prompts[(place + number) % len(prompts)]
            try:
                pairs.append((prompt, answers[number](prompt)))
            except Exception as error:
                pairs.append((prompt, repr(error)))
        return pairs

    with ThreadPoolExecutor(len(answers)) as pool:
        return [pair for part in pool.map(work, range(len(answers))) for pair in part]


def check(answers: Sequence[Answer], alone: Answer, prompts: list[Any], rounds: int = 3) -> None:
    """All threads give the answers that `alone` gives while nothing else runs."""
    expected = [alone(prompt) for prompt in prompts]
    given = all_at_once(answers, prompts, rounds)
    wrong = [(p, answer) for p, answer in given if answer != expected[prompts.index(p)]]
    assert not wrong, f"{len(wrong)} of {len(given)} answers are wrong, such as {wrong[0]}"


def greedy(decoder: Decoder | OracleDecoder, count: int = 4) -> Answer:
    return lambda prompt: decoder.generate([prompt], max_new_tokens=count).sequences[0]


@pytest.mark.parametrize("name", ["plain", "eagle3:tree", "draft-model", "own-layers", "self"])
def test_eager_answers_do_not_depend_on_other_threads(target, make_drafter, name) -> None:
    drafter = None if name == "plain" else make_drafter(name, target)
    answer = greedy(Decoder(target, drafter))
    for prompts in PROMPTS.values():
        check([answer] * THREADS, greedy(OracleDecoder(target)), prompts, rounds=2)


@pytest.mark.parametrize("name", ["plain", "draft-model", "medusa:tree"])
def test_recorded_answers_do_not_depend_on_other_threads(
    make_target, make_drafter, name, monkeypatch
) -> None:
    """From the first answers on, while recordings are made."""
    rehearse(monkeypatch)
    target = make_target(seed=0, layers=1)
    recorded = RecordedTarget(target)
    drafter = None if name == "plain" else make_drafter(name, recorded)
    if drafter is not None:
        drafter.compile(recorded)
    answer = greedy(Decoder(recorded, drafter))
    for prompts in PROMPTS.values():
        check([answer] * THREADS, greedy(OracleDecoder(target)), prompts, rounds=2)


def test_decoders_over_one_model_do_not_depend_on_each_other(make_drafter) -> None:
    model = tiny_llama()
    targets = [Target(model) for _ in range(THREADS)]
    drafters = [None, *(make_drafter("eagle3:tree", target) for target in targets[1:])]
    answers = [greedy(Decoder(*pair)) for pair in zip(targets, drafters, strict=True)]
    for prompts in PROMPTS.values():
        check(answers, greedy(OracleDecoder(Target(model))), prompts)


def test_passes_of_the_models_owner_are_neither_read_nor_changed(target) -> None:
    """Whoever made the model may run it meanwhile and knows nothing of our lock."""

    def generate(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": 7, "pad_token_id": 0}
        answer = target.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return answer[0, len(prompt) :].tolist()

    for prompts in PROMPTS.values():
        check([greedy(Decoder(target, PromptLookup(3))), generate, generate], generate, prompts)


def test_the_bias_of_an_alibi_target_is_arranged_for_its_own_pass() -> None:
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
    torch.manual_seed(0)
    model = BloomForCausalLM(config).eval()
    answers = [greedy(Decoder(Target(model), PromptLookup(n))) for n in (2, 3, 4)]
    check(answers, greedy(OracleDecoder(Target(model))), PROMPTS["different"], rounds=5)


def test_texts_from_several_threads_share_a_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    decoder = Decoder(Target(tiny_llama(vocab_size=len(tokenizer)), tokenizer))

    def text(prompt: str) -> str:
        return decoder.generate(prompt, max_new_tokens=4).texts[0]

    check([text] * THREADS, text, ["def f", "one", "for i in", "x" * 20])


def test_threads_share_a_plan_and_what_it_learns(
    target, make_drafter, monkeypatch, tmp_path
) -> None:
    """Each has its own runs of steps; a warm-up meanwhile changes no answer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decoder = Decoder(target, make_drafter("medusa:own", target), adaptive=True)
    answer = greedy(decoder, 20)

    def warm(prompt: list[int]) -> list[int]:
        seconds = {budget: 1e-3 for budget in (None, *decoder.plans.drafter.budgets)}
        decoder.plans.costs(StepKind("greedy", 1, False, False)).set_timed(seconds)
        return answer(prompt)

    expected = greedy(OracleDecoder(target), 20)
    check([answer, answer, warm], expected, PROMPTS["different"], rounds=3)
    costs = decoder.plans.costs(StepKind("greedy", 1, False, False))
    assert len(decoder.plans.plans) == 1 and np.isfinite(costs.mean).all()
    assert np.linalg.eigvalsh(costs.covariance)[0] > -1e-9
