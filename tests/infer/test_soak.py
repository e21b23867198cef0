"""A long mixed load: thousands of requests of every kind from several threads, on one model.

`pytest -m slow -s tests/infer/test_soak.py` prints what was decoded and how the memory went.
"""

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import psutil
import pytest
import torch
from tiny import tiny_llama

from drafthead.core.drafting.drafter import Drafter
from drafthead.core.target.target import Target
from drafthead.infer.decoder import Decoder

REQUESTS, THREADS = 2000, 4
DRAFTERS = ("medusa:tree", "eagle:tree", "parallel:own", "hydra:chain", "draft-model",
            "prompt-lookup")  # fmt: skip
RULES = ("match", "rejection", "traversal", "typical", "lenient")
LONGEST = 3000
# What the last half of the load may add to the process: allocators keep memory for each thread.
GROWTH = 64 * 2**20


@pytest.fixture(scope="module")
def long_target() -> Target:
    """Float32, with room for prompts of `LONGEST` tokens."""
    config = {"max_position_embeddings": LONGEST + 200, "eos_token_id": 7, "pad_token_id": 0}
    return Target(tiny_llama(0, **config))


def by_generate(target: Target, prompt: list[int], limit: int) -> list[int]:
    """transformers' greedy answer."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        answer = target.model.generate(ids, max_new_tokens=limit, do_sample=False)
    return answer[0, len(prompt) :].tolist()


def lengths(chance: random.Random) -> Iterator[int]:
    """Lengths of prompts: many short ones, some of thousands of tokens."""
    while True:
        yield int(LONGEST ** chance.random())


class Load:
    """Requests drawn by number, so that a failure can be repeated alone."""

    def __init__(self, target: Target, decoders: list[Decoder]):
        self.target, self.decoders = target, decoders
        self.done: Counter[str] = Counter()

    def request(self, number: int) -> None:
        """Decode one request and check what can be checked of its answers."""
        chance = random.Random(number)
        decoder = chance.choice(self.decoders)
        rows = chance.choice([1, 1, 1, 2, 4, 8])
        prompts = [
            [chance.randrange(8, 64) for _ in range(length)]
            for length in islice(lengths(chance), rows)
        ]
        limit, kind = chance.randint(1, 24), chance.choice(["greedy", "greedy", *RULES])
        options = {"max_new_tokens": limit, "seed": number}
        if kind != "greedy":
            options |= {"temperature": chance.choice([0.7, 1.0]), "verifier": kind}
        if chance.random() < 0.15:
            steps = decoder.steps(prompts, **options)
            list(islice(steps, chance.randint(0, 3)))
            steps.close()
            self.done["cancelled"] += 1
            return
        answers = decoder.generate(prompts, **options).sequences
        assert all(0 < len(answer) <= limit for answer in answers), number
        self.done[kind] += 1
        if kind == "greedy":
            expected = [by_generate(self.target, prompt, limit) for prompt in prompts]
            assert answers == expected, f"request {number}"
            self.done["greedy rows"] += rows
        elif kind == "match":
            again = decoder.generate(prompts, **options).sequences
            assert answers == again, f"request {number}"


def memory() -> int:
    """Bytes of the process."""
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.slow
def test_every_greedy_answer_is_right_and_memory_stays_flat(
    long_target: Target, make_drafter: Callable[[str, Target], Drafter]
) -> None:
    drafters = [make_drafter(name, long_target) for name in DRAFTERS]
    decoders = [Decoder(long_target)]
    decoders += [Decoder(long_target, drafter) for drafter in drafters]
    decoders += [Decoder(long_target, drafter, adaptive=True) for drafter in drafters]
    load = Load(long_target, decoders)
    used = []
    with ThreadPoolExecutor(THREADS) as pool:
        for part in range(4):
            numbers = range(part * REQUESTS // 4, (part + 1) * REQUESTS // 4)
            list(pool.map(load.request, numbers))
            used.append(memory())
    print(dict(load.done), [round(bytes_ / 2**20) for bytes_ in used], "MiB")
    assert sum(load.done[kind] for kind in ("cancelled", "greedy", *RULES)) == REQUESTS
    assert used[-1] - used[1] < GROWTH
