"""Each drafter in one test: every way of decoding, one text."""

import pytest
from drafters import DRAFTERS
from tiny import BUSHY, random_prompts
from transformers import GenerationConfig

from drafthead.infer import Decoder
from drafthead.infer.serving import ServeRequest
from drafthead.lab.exactness.oracle import OracleDecoder

PROMPTS = random_prompts(6)
DRAWN = {"temperature": 1.2, "seed": 3}
IN_CHUNKS = GenerationConfig(prefill_chunk_size=3)
MOST = 14  # new tokens


@pytest.fixture(scope="module")
def plain(target) -> dict[str, list[list[int]]]:
    """What plain decoding answers, greedily and drawn."""
    oracle, limits = OracleDecoder(target), {"max_new_tokens": MOST}
    return {
        "greedy": oracle.generate(PROMPTS, **limits).sequences,
        "drawn": oracle.generate(PROMPTS, **limits, **DRAWN).sequences,
    }


def served(decoder: Decoder) -> list[list[int]]:
    """Answers to prompts that join and leave a batch of three, each with its own limit."""
    requests = [
        ServeRequest(prompt, max_new_tokens=limit_of(number))
        for number, prompt in enumerate(PROMPTS)
    ]
    answers = {answer.id: answer.tokens for answer in decoder.serve(requests, max_rows=3)}
    return [answers[number] for number in range(len(PROMPTS))]


def limit_of(number: int) -> int:
    """How many tokens the answer to a prompt may have when it is served."""
    return (3, MOST, 9)[number % 3]


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_way_of_decoding_gives_the_text_of_plain_decoding(
    target, make_drafter, name, plain
) -> None:
    drafter = make_drafter(name, target)
    decoder, limits = Decoder(target, drafter), {"max_new_tokens": MOST}
    found = decoder.generate(PROMPTS, **limits)
    assert found.sequences == plain["greedy"]
    drawn = decoder.generate(PROMPTS, **limits, **DRAWN, verifier="match")
    assert drawn.sequences == plain["drawn"]
    steps = [n for each in (found, drawn) for row in each.stats.accept_lengths for n in row]
    assert max(steps) > 1, "a drafter of which nothing is accepted tests nothing"
    chunks = decoder.generate(PROMPTS, **limits, generation_config=IN_CHUNKS)
    assert chunks.sequences == plain["greedy"]
    cut = [answer[: limit_of(number)] for number, answer in enumerate(plain["greedy"])]
    assert served(decoder) == cut
    for budget in drafter.budgets:
        if budget.nodes <= BUSHY.num_nodes:
            one_size = Decoder(target, drafter, budget)
            for rows in (slice(0, 1), slice(1, 3)):
                found = one_size.generate(PROMPTS[rows], **limits)
                assert found.sequences == plain["greedy"][rows], budget


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_rows_draws_do_not_depend_on_the_rows_beside_it(target, make_drafter, name) -> None:
    decoder = Decoder(target, make_drafter(name, target))
    options = {"max_new_tokens": 12, "temperature": 1.0, "verifier": "rejection"}
    together = decoder.generate(PROMPTS[:2], seed=[5, 6], **options).sequences
    alone = [decoder.generate(PROMPTS[n], seed=5 + n, **options).sequences[0] for n in range(2)]
    assert together == alone
