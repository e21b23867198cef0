"""Rows of requests of all kinds: each gains what it would gain alone, and may leave."""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rehearsal import rehearse
from tiny import byte_tokenizer, random_prompts, tiny_llama
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList

from drafthead.backends.cuda.recorded_target import RecordedTarget
from drafthead.core.kv_cache.column_cache import BLOCK
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.engine.stepper import Stepper
from drafthead.infer.request.options import DecodeOptions, read_options
from drafthead.infer.request.stopping import Stop
from drafthead.infer.scheduling.running_rows import RunningRows, ServedRows
from drafthead.infer.scheduling.tickets import Gain, Ticket

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


@pytest.mark.parametrize("name", SOME)
def test_long_prompts_are_read_in_parts_and_answered_as_if_they_were_not(
    target, make_drafter, name
) -> None:
    decoder = decoder_with(name, target, make_drafter)
    prompts = [random_prompts(2)[0] * 3, [9, 10, 11], [9, 10, 11, 12] * 6]
    options = read_options({"max_new_tokens": 6})
    rows = decoder.running_rows(4)
    rows.prompts.most = 7
    tickets = [Ticket(n, decoder.request(each, options)) for n, each in enumerate(prompts)]
    found = all_gains(rows, tickets, at_once=3)
    for number, prompt in enumerate(prompts):
        tokens = [token for gain in found[number] for token in gain.tokens]
        assert tokens == decoder.generate(prompt, max_new_tokens=6).sequences[0]
        assert found[number][0].row.reused == 0


@pytest.mark.parametrize("name", ["none", "draft-model", "eagle3:own"])
def test_recorded_passes_read_parts_and_keep_answers_too(
    target, make_drafter, monkeypatch, name
) -> None:
    rehearse(monkeypatch)
    prompts = [[9, 10, 11, 12] * 6, [13, 14], [9, 10, 11, 12] * 5]
    decoder, recorded = decoder_with(name, target, make_drafter), RecordedTarget(target)
    if decoder.drafter is not None:
        decoder.drafter.compile(recorded)
    decoder = Decoder(recorded, decoder.drafter)
    decoder.memory.most_kept = 4
    rows, options = decoder.running_rows(4), read_options({"max_new_tokens": 6})
    rows.prompts.most = 7
    plain = Decoder(target)
    for again in range(3):  # the second time from what was kept
        longer = [[*prompt, *[20 + again] * again] for prompt in prompts]
        tickets = [Ticket(n, decoder.request(each, options)) for n, each in enumerate(longer)]
        found = all_gains(rows, tickets, at_once=2)
        for number, prompt in enumerate(longer):
            tokens = [token for gain in found[number] for token in gain.tokens]
            assert tokens == plain.generate(prompt, max_new_tokens=6).sequences[0]
            assert (found[number][0].row.reused > 0) >= (again > 0 and len(prompt) > 9)


def test_what_is_kept_or_forgotten_while_a_prompt_waits_changes_no_answer(target) -> None:
    decoder = Decoder(target)
    decoder.end_ids, decoder.memory.most_kept = frozenset(), 4
    prompt, options = [9, 10, 11, 12] * 8, read_options({"max_new_tokens": 5})
    rows = decoder.running_rows(4)
    rows.prompts.most = 8
    tickets = [Ticket(n, decoder.request([*prompt, n + 8], options)) for n in range(3)]
    expected = [decoder.generate([*prompt, n + 8], max_new_tokens=5).sequences[0] for n in range(3)]
    rows.admit(tickets[1:2])  # nothing is known yet
    found = all_gains(decoder.running_rows(1), tickets[:1], at_once=1)
    found |= all_gains(rows, [], at_once=0)
    assert found[1][0].row.reused > 0
    rows.admit(tickets[2:])
    decoder.forget()
    found |= all_gains(rows, [], at_once=0)
    assert found[2][0].row.reused == 0
    for number, gains in found.items():
        assert [token for gain in gains for token in gain.tokens] == expected[number]


def test_rows_go_on_while_a_long_prompt_is_read(target) -> None:
    decoder = Decoder(target)
    decoder.end_ids = frozenset()
    rows, options = decoder.running_rows(4), read_options({"max_new_tokens": 40})
    rows.prompts.most = 4
    rows.admit([Ticket("short", decoder.request([9, 10], options))])
    rows.step()
    rows.admit([Ticket("long", decoder.request([9, 10, 11] * 20, options))])
    came = []
    while rows.prompts.count:
        came += [gain.ticket.id for gain in rows.step()]
    assert came.count("short") >= 3 and came[-1] == "long"
    rows.cancel({"short", "long"})
    rows.admit([Ticket("never", decoder.request([9, 10, 11] * 20, options))])
    rows.step()
    rows.cancel({"never"})
    assert rows.count == 0 and rows.step() == []


def test_rows_of_other_lengths_are_other_batches_until_they_cost_less_as_one(
    target, monkeypatch
) -> None:
    monkeypatch.setattr("drafthead.infer.scheduling.running_rows.EAGER_STEP_COST", 60)
    monkeypatch.setattr("drafthead.infer.scheduling.running_rows.COUNTED", 1)
    decoder = Decoder(target)
    decoder.end_ids = frozenset()
    prompts = {"long": [9, 10] * 50, **{n: [11 + n, 12] for n in range(3)}}
    rows, found = decoder.running_rows(8), defaultdict(list)
    limits = {"long": 12, 0: 5, 1: 5, 2: 12}
    for name, prompt in prompts.items():
        options = read_options({"max_new_tokens": limits[name]})
        rows.admit([Ticket(name, decoder.request(prompt, options))])
    sizes = []
    while rows.count:
        for gain in rows.step():
            found[gain.ticket.id] += gain.tokens
        sizes.append(sorted(each.count for each in rows.batches))
    assert [1, 3] in sizes
    for name, prompt in prompts.items():
        expected = decoder.generate(prompt, max_new_tokens=limits[name]).sequences[0]
        assert found[name] == expected
    served = [ServedRows.__new__(ServedRows) for _ in range(2)]
    for each, lengths in zip(served, ([100], [3, 3, 3]), strict=True):
        monkeypatch.setattr(type(each), "lengths", property(lambda self: self.own), raising=False)
        each.own, each.way, each.stepper = lengths, "way", SimpleNamespace(target=target)
    assert not served[0].suits(served[1])
    served[1].own = [50]
    assert served[0].suits(served[1])


class Fails(Stop):
    """A stop that raises at the second token."""

    def __init__(self) -> None:
        super().__init__((), ())
        self.seen = 0

    def __call__(self, token: int) -> None:
        self.seen += 1
        if self.seen == 2:
            raise ValueError("no such text")


def fail(*_: Any) -> Any:
    raise ValueError("no such text")


@pytest.mark.parametrize("where", ["stop", "processor", "prompt", "step"])
def test_what_fails_ends_one_answer_and_no_other(target, monkeypatch, where) -> None:
    decoder = Decoder(target, PromptLookup(3))
    decoder.end_ids = frozenset()
    prompts, options = random_prompts(4), read_options({"max_new_tokens": 9})
    prompts[1] = list(prompts[0])  # they are read in one pass
    requests = [decoder.request(prompt, options) for prompt in prompts]
    if where == "stop":
        requests[1] = replace(requests[1], stops=[Fails()])
    elif where == "processor":
        requests[1] = replace(requests[1], processors=[LogitsProcessorList([fail])])
    elif where == "prompt":
        prefill = Stepper.prefill

        def or_fail(self: Stepper) -> Any:
            if any(request is requests[1].prompts[0] for request in self.run.request.prompts):
                fail()
            return prefill(self)

        monkeypatch.setattr(Stepper, "prefill", or_fail)
    else:  # of a batch of its own
        requests[1] = decoder.request(prompts[1], read_options({"logprobs": 1}))
        step = ServedRows.step
        monkeypatch.setattr(
            ServedRows, "step", lambda rows: fail() if rows.way.logprobs else step(rows)
        )
    tickets = [Ticket(n, request) for n, request in enumerate(requests)]
    found = all_gains(decoder.running_rows(6), tickets, at_once=4)
    assert found[1][-1].ended and found[1][-1].error == "no such text"
    for number in (0, 2, 3):
        expected = decoder.generate(prompts[number], max_new_tokens=9).sequences[0]
        assert [token for gain in found[number] for token in gain.tokens] == expected
        assert found[number][-1].error is None


def test_a_kept_answer_has_the_columns_that_it_needs_and_all_have_a_limit(target) -> None:
    decoder = Decoder(target)
    decoder.end_ids, memory = frozenset(), decoder.memory
    memory.most_kept = 8
    rows = decoder.running_rows(4)
    requests = {"long": ([9, 10] * 100, 20), **{n: ([11 + n, 12], 4) for n in range(3)}}
    tickets = [
        Ticket(name, decoder.request(prompt, read_options({"max_new_tokens": limit})))
        for name, (prompt, limit) in requests.items()
    ]
    all_gains(rows, tickets, at_once=4)
    columns = {len(past.tokens): past.cache.keys[0].shape[2] for past, _ in memory.kept}
    assert columns == {6: BLOCK, 220: 2 * BLOCK}
    *_, (last, _) = memory.kept
    assert last.bytes == sum(states.nbytes for states in last.cache.states) > 0
    memory.most_bytes = last.bytes
    all_gains(rows, [Ticket(9, replace(tickets[1].request, prompts=[[30, 31]]))], at_once=1)
    assert [len(past.tokens) for past, _ in memory.kept] == [6]
