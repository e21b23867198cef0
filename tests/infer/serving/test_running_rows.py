"""Rows of requests of all kinds: each gains what it would gain alone, and may leave."""

from collections import defaultdict
from typing import Any

import pytest
from tiny import byte_tokenizer, random_prompts, tiny_llama
from transformers import GenerationConfig

from drafthead.heads.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.request.options import DecodeOptions, read_options
from drafthead.infer.running_rows import RunningRows
from drafthead.infer.tickets import Gain, Ticket

SOME = ["none", "prompt-lookup", "draft-model", "medusa:tree", "hydra:own", "eagle3:own",
        "parallel:own+lookup"]  # fmt: skip
WAYS: list[DecodeOptions] = [
    {"logprobs": 2},
    {"temperature": 0.9, "verifier": "match", "logprobs": 1},
    {"generation_config": GenerationConfig(repetition_penalty=1.3), "logprobs": 2},
    {},
]


def decoder_with(name: str, target: Target, make_drafter) -> Decoder:
    return Decoder(target, None if name == "none" else make_drafter(name, target))


def tickets_of(decoder: Decoder, options: list[DecodeOptions]) -> list[Ticket]:
    prompts = random_prompts(len(options))
    return [
        Ticket(n, decoder.request(prompt, read_options({"seed": n, **each})))
        for n, (prompt, each) in enumerate(zip(prompts, options, strict=True))
    ]


def all_gains(rows: RunningRows, tickets: list[Ticket], at_once: int) -> dict[Any, list[Gain]]:
    """The gains of each request, where the next requests come after each step."""
    found: dict[Any, list[Gain]] = defaultdict(list)
    while tickets or rows.count:
        free = min(at_once, rows.max_rows - rows.count)
        come, tickets = tickets[:free], tickets[free:]
        rows.admit(come)
        for gain in rows.step():
            found[gain.ticket.id].append(gain)
    return found


@pytest.mark.parametrize("name", SOME)
def test_each_row_gains_tokens_and_logprobs_as_if_it_were_alone(target, make_drafter, name) -> None:
    decoder = decoder_with(name, target, make_drafter)
    options = [{**WAYS[n % len(WAYS)], "max_new_tokens": 3 + n % 9} for n in range(16)]
    found = all_gains(decoder.running_rows(6), tickets_of(decoder, options), at_once=2)
    for number, (prompt, each) in enumerate(zip(random_prompts(16), options, strict=True)):
        alone = decoder.generate(prompt, seed=number, **each)
        gains = found[number]
        assert [token for gain in gains for token in gain.tokens] == alone.sequences[0]
        assert gains[-1].ended and not any(gain.ended for gain in gains[:-1])
        assert gains[0].proposed == 0
        assert all(gain.proposed >= gain.accepted >= len(gain.tokens) - 1 for gain in gains)
        if "logprobs" in each:
            assert alone.logprobs is not None
            raw = [value for gain in gains for value in gain.logprobs.raw]
            top = [[token for token, _ in best] for gain in gains for best in gain.logprobs.top]
            assert raw == pytest.approx(alone.logprobs[0].raw, abs=1e-4)
            assert top == [[token for token, _ in best] for best in alone.logprobs[0].top]


def test_a_row_that_is_cancelled_is_free_and_the_others_go_on(target, make_drafter) -> None:
    decoder = decoder_with("eagle3:own", target, make_drafter)
    decoder.end_ids = frozenset()
    tickets = tickets_of(decoder, [{"max_new_tokens": 12}] * 5)
    rows = decoder.running_rows(3)
    gained = defaultdict(list)

    def note(gains: list[Gain]) -> None:
        for gain in gains:
            gained[gain.ticket.id] += gain.tokens

    rows.admit(tickets[:3])
    note(rows.step())
    note(rows.step())
    rows.cancel({1})
    assert rows.count == 2
    before = list(gained[1])
    rows.admit(tickets[3:4])
    while rows.count:
        note(rows.step())
    assert gained[1] == before
    prompts = random_prompts(5)
    for number in (0, 2, 3):
        assert gained[number] == decoder.generate(prompts[number], max_new_tokens=12).sequences[0]
    rows.admit(tickets[4:])
    rows.cancel({4, "unknown"})
    assert not rows.batches and not rows.count


@pytest.mark.parametrize("name", SOME)
def test_what_was_read_for_an_answer_is_kept_for_prompts_that_go_on_with_it(
    make_drafter, name
) -> None:
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    decoder = decoder_with(
        name,
        Target(tiny_llama(vocab_size=len(tokenizer), eos_token_id=end), tokenizer),
        make_drafter,
    )
    decoder.memory.most_kept = 2
    rows, prompts = decoder.running_rows(4), random_prompts(4)

    def answers(asked: list[list[int]]) -> list[Gain]:
        options = read_options({"max_new_tokens": 9})
        tickets = [Ticket(n, decoder.request(each, options)) for n, each in enumerate(asked)]
        found = all_gains(rows, tickets, at_once=4)
        return [found[number][-1] for number in range(len(asked))]

    first = answers(prompts)
    assert len(decoder.memory.kept) == 2, "the last ones"
    later = [[*p, *g.row.tokens, 9, 10] for p, g in zip(prompts, first, strict=True)]
    second = answers(later)
    assert sum(gain.row.reused > 0 for gain in second) == 2
    for prompt, gain in zip(later, second, strict=True):
        assert gain.row.reused in (0, len(prompt) - 3, len(prompt) - 4)
        expected = Decoder(decoder.target).generate(prompt, max_new_tokens=9).sequences[0]
        assert gain.row.tokens == expected


def test_a_drafter_does_not_go_on_from_an_answer_that_was_decoded_plainly(
    target, make_drafter
) -> None:
    decoder = Decoder(target, make_drafter("eagle3:own", target), adaptive=True)
    decoder.plans.fixed_budget = None  # no tree pays where children are drawn
    decoder.memory.most_kept = 4
    rows, prompt = decoder.running_rows(2), random_prompts(1)[0]

    def gains(asked: list[int], options: DecodeOptions) -> list[Gain]:
        request = decoder.request(asked, read_options({"max_new_tokens": 9, **options}))
        return all_gains(rows, [Ticket(0, request)], at_once=1)[0]

    drawn: DecodeOptions = {"temperature": 0.9, "verifier": "rejection"}
    first = gains(prompt, drawn)[-1].row
    longer = [*prompt, *first.tokens, 9]
    found = gains(longer, {})
    assert found[-1].row.reused == 0
    assert found[-1].row.tokens == decoder.generate(longer, max_new_tokens=9).sequences[0]
    assert gains([*longer, 10], drawn)[-1].row.reused > 0
