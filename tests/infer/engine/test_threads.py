"""Decoding from several threads at once: every answer is the one that is given alone."""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from tiny import byte_tokenizer, llama_config, tiny_llama
from transformers import BloomConfig, BloomForCausalLM, LlamaForCausalLM

from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import Budget, TreeShape
from drafthead.infer import decoder as decoder_module
from drafthead.infer.decoder import Decoder, decoder_for
from drafthead.infer.drafters.prompt_lookup import PromptLookup
from drafthead.infer.engine.compiled_target import CompiledTarget
from drafthead.infer.engine.planner import AdaptivePlan
from drafthead.infer.measuring.oracle import OracleDecoder

THREADS = 3
LENGTHS = {"equal": [8] * 8, "different": [3, 8, 5, 13, 1, 6, 11, 9]}
Answer = Callable[[list[int]], list[int]]  # the new tokens after a prompt


@pytest.fixture(autouse=True)
def threads_take_turns_often() -> Iterator[None]:
    """Python changes threads every 10 us instead of every 5 ms."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def prompts_of(lengths: Sequence[int], vocab: int = 64) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(8, vocab, (n,), generator=generator).tolist() for n in lengths]


def all_at_once(functions: Sequence[Answer], prompts: list[list[int]], rounds: int) -> list[object]:
    """One thread for each function gives it all prompts, `rounds` times; answers or exceptions.

    Each thread begins with another prompt.
    """
    start = Barrier(len(functions))

    def work(number: int) -> list[tuple[list[int], object]]:
        start.wait()
        given = []
        for place in range(rounds * len(prompts)):
            prompt = prompts[(place + number) % len(prompts)]
            try:
                given.append((prompt, functions[number](prompt)))
            except Exception as error:
                given.append((prompt, repr(error)))
        return given

    with ThreadPoolExecutor(len(functions)) as pool:
        return [pair for part in pool.map(work, range(len(functions))) for pair in part]


def check(
    functions: Sequence[Answer], alone: Answer, prompts: list[list[int]], rounds: int = 5
) -> None:
    """What the threads give is what `alone` gives."""
    expected = {tuple(prompt): alone(prompt) for prompt in prompts}
    given = all_at_once(functions, prompts, rounds)
    wrong = [(p, answer) for p, answer in given if answer != expected[tuple(p)]]
    assert not wrong, f"{len(wrong)} of {len(given)} answers are wrong: {wrong[0]}"


def greedy(decoder: Decoder | OracleDecoder, count: int = 4) -> Answer:
    return lambda prompt: decoder.generate([prompt], max_new_tokens=count).sequences[0]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", ["plain", "eagle3:tree", "draft-model", "self"])
def test_eager_answers_do_not_depend_on_other_threads(target, make_drafter, name, lengths) -> None:
    drafter = None if name == "plain" else make_drafter(name, target)
    answer = greedy(Decoder(target, drafter))
    check([answer] * THREADS, greedy(OracleDecoder(target)), prompts_of(LENGTHS[lengths]))


@pytest.mark.parametrize("name", ["plain", "medusa:tree", "draft-model"])
def test_compiled_answers_do_not_depend_on_other_threads(
    make_target, make_drafter, target, name
) -> None:
    """From the first answers on, for which the graphs have still to be made."""
    compiled = CompiledTarget(make_target(seed=0))
    drafter = None if name == "plain" else make_drafter(name, compiled)
    if drafter is not None:
        drafter.compile()
    answer = greedy(Decoder(compiled, drafter))
    for lengths in LENGTHS.values():
        check([answer] * THREADS, greedy(OracleDecoder(target)), prompts_of(lengths))


def test_decoders_over_one_model_do_not_depend_on_each_other(make_drafter) -> None:
    """One plain, one with a head, one with sampled text; each has a target of its own."""
    model = tiny_llama()
    plain, sampled, oracle = (Target(model) for _ in range(3))
    headed = Target(model)
    decoders = [
        Decoder(plain),
        Decoder(headed, make_drafter("eagle3:tree", headed)),
        Decoder(sampled, make_drafter("medusa:tree", sampled)),
    ]
    check([*map(greedy, decoders)], greedy(OracleDecoder(oracle)), prompts_of(LENGTHS["equal"]))


def test_passes_of_others_over_the_model_are_neither_read_nor_changed(target) -> None:
    """Whoever owns the model may use it meanwhile: it knows nothing of our locks."""

    def generate(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": 7, "pad_token_id": 0}
        answer = target.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return answer[0, len(prompt) :].tolist()

    for lengths in LENGTHS.values():
        check([greedy(Decoder(target)), generate], generate, prompts_of(lengths))


def test_targets_with_alibi_arrange_the_bias_of_their_own_pass_only() -> None:
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
    torch.manual_seed(0)
    model = BloomForCausalLM(config)
    shape = TreeShape.from_paths([(0,), (1,), (0, 0)])
    target = Target(model)
    lookup = Decoder(target, PromptLookup(3))
    check([greedy(lookup), greedy(Decoder(Target(model)))] * 2, greedy(OracleDecoder(target)),
          prompts_of(LENGTHS["different"]), rounds=5)
    assert shape
