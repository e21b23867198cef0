"""Requests that come and go get the answers that they would get alone."""

import gc
import random
import threading
import weakref
from dataclasses import replace
from itertools import count, islice
from queue import Queue
from typing import Any

import pytest
import torch
from hidden_answers import generated
from stages import more
from tiny import END, VOCAB, byte_tokenizer, random_prompts
from transformers import GenerationConfig, PrefixConstrainedLogitsProcessor

from drafthead.core.errors import UserError
from drafthead.core.kv_cache.column_cache import BLOCK, ColumnCache
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.engine.stepper import Stepper
from drafthead.infer.request.options import read_options
from drafthead.infer.scheduling.prompt_queue import MOST_PADDING, group_of
from drafthead.infer.scheduling.running_rows import seats
from drafthead.infer.scheduling.tickets import Ticket
from drafthead.infer.serving import Answer, ServeRequest

# Those that differ in what they know of a row.
SERVED = ["none", "prompt-lookup", "draft-model", "own-layers", "medusa:tree", "hydra:own",
          "eagle3:own", "parallel:own", "parallel:own+lookup"]  # fmt: skip


def decoder_with(name: str, target, make_drafter) -> Decoder:
    return Decoder(target, None if name == "none" else make_drafter(name, target))


def mixed_requests(amount: int) -> list[ServeRequest]:
    """Prompts of 1 to 20 tokens with limits of 1 to 30, in a random order."""
    chance = random.Random(1)
    return [
        ServeRequest(prompt, max_new_tokens=chance.choice([1, 3, 8, 30]))
        for prompt in random_prompts(amount)
    ]


@pytest.fixture(scope="module")
def greedy_answers(target) -> list[list[int]]:
    return [
        generated(target.model, request.prompt, request.max_new_tokens)
        for request in mixed_requests(30)
    ]


@pytest.mark.parametrize("max_rows", [1, 4])
def test_each_request_has_its_own_sampling_and_stops(make_target, max_rows) -> None:
    """Whatever runs beside it."""
    decoder = Decoder(Target(make_target(vocab=260).model, byte_tokenizer()), PromptLookup(3))
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 50, "stop_strings": list("abcdefghijklmnop")},
        {"stop_strings": "e"},
        {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 3},
        {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.5},
    ]
    prompts = random_prompts(15)
    requests = [
        ServeRequest(prompt, seed=n, options=ways[n % len(ways)])
        for n, prompt in enumerate(prompts)
    ]
    served = {a.id: a for a in decoder.serve(requests, max_rows=max_rows, max_new_tokens=20)}
    reasons = set()
    for number, prompt in enumerate(prompts):
        options = {"max_new_tokens": 20, **ways[number % len(ways)]}
        alone = decoder.generate(prompt, seed=number, **options)
        assert (served[number].tokens, served[number].error) == (alone.sequences[0], None)
        reasons.add(served[number].finish_reason)
    assert {"stop_string", "length"} <= reasons
    requests = [ServeRequest([9, 10], options={"temperature": 1.0}), ServeRequest([9, 10])]
    refused, answered = sorted(decoder.serve(requests, verifier="greedy"), key=lambda a: a.id)
    assert "greedy" in (refused.error or "") and answered.error is None


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("max_rows", [1, 4])
def test_greedy_answers_are_those_of_transformers(
    target, make_drafter, greedy_answers, name, max_rows
) -> None:
    decoder = decoder_with(name, target, make_drafter)
    answers = list(decoder.serve(iter(mixed_requests(30)), max_rows=max_rows))
    assert sorted(answer.id for answer in answers) == list(range(30))
    for answer in answers:
        assert answer.tokens == greedy_answers[answer.id]
        assert answer.finish_reason == ("end_token" if END in answer.tokens else "length")
        assert answer.error is None
    if max_rows > 1:
        assert [answer.id for answer in answers] != list(range(30)), "short ones do not wait"


def test_drawn_drafts_and_processors_do_not_depend_on_the_other_rows(target, make_drafter) -> None:
    decoder = decoder_with("medusa:tree", target, make_drafter)
    prompts, config = random_prompts(10), GenerationConfig(repetition_penalty=1.3)
    for options in (
        {"temperature": 0.9, "verifier": "rejection"},
        {"generation_config": config, "max_new_tokens": 15},
    ):
        answers = {answer.id: answer.tokens for answer in decoder.serve(prompts, **options)}
        for number, prompt in enumerate(prompts):
            alone = decoder.generate(prompt, seed=number, **options).sequences[0]
            assert answers[number] == alone


def test_an_endless_iterable_is_read_only_as_rows_become_free(target) -> None:
    taken = []

    def endless():
        for number in count():
            taken.append(number)
            yield ServeRequest([8 + number % 50], id=f"request {number}", max_new_tokens=4)

    answers = list(islice(Decoder(target).serve(endless(), max_rows=3), 9))
    assert len({answer.id for answer in answers}) == 9
    assert len(taken) <= 9 + 3


def test_a_queue_is_waited_for_only_while_no_row_runs(target) -> None:
    requests: Queue = Queue()
    answers: Queue[Answer] = Queue()

    def work() -> None:
        for answer in Decoder(target).serve(requests, max_rows=2, max_new_tokens=4):
            answers.put(answer)

    worker = threading.Thread(target=work)
    worker.start()
    for number in range(3):  # each arrives when the server is idle
        requests.put(ServeRequest([9, 10 + number], id=number))
        assert answers.get(timeout=30).id == number
    for number in range(5):
        requests.put(ServeRequest([9, 10 + number], id=number))
    requests.put(None)
    worker.join(timeout=30)
    assert not worker.is_alive()
    assert sorted(answers.get().id for _ in range(5)) == list(range(5))


BAD = {
    "too long": ([9] * 256, "prompt 0 has 256 tokens, but the target's context holds 256"),
    "unknown token": ([9, VOCAB], "token id 64"),
    "no prompt": (3.5, "has the type float"),
    "nothing": (None, "no prompt to decode"),
    "empty": ([], "there is no prompt"),
    "several": ([[9], [10]], "a request has one prompt, got 2"),
    "text": ("hello", "no tokenizer"),
    "limit": (ServeRequest([9], max_new_tokens=0), "max_new_tokens must be at least 1"),
    "seed": (ServeRequest([9], seed="x"), "seed must be an integer"),
    "time": (ServeRequest([9], options={"max_time": 1}), "serve does not take max_time"),
    "option": (ServeRequest([9], options={"top_q": 1}), "unknown option 'top_q'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_request_that_cannot_be_honoured_gets_an_error_and_the_others_their_answers(
    target, greedy_answers, name
) -> None:
    request, reason = BAD[name]
    requests = mixed_requests(30)[:6]
    answers = list(Decoder(target).serve([request, *requests[:3], request, *requests[3:]]))
    errors = [answer for answer in answers if answer.error is not None]
    assert [answer.id for answer in errors] == [0, 4]
    assert all(reason in answer.error for answer in errors)
    good = sorted((answer.id, answer.tokens) for answer in answers if answer.error is None)
    assert [tokens for _, tokens in good] == greedy_answers[:6]


def test_a_row_without_numbers_fails_alone(make_target, greedy_answers) -> None:
    target = make_target(seed=0)
    target.model.get_input_embeddings().weight.data[5] = torch.nan
    requests = mixed_requests(30)[:6]
    damaged = ServeRequest([9, 5, 10], id="damaged", max_new_tokens=8)
    answers = {
        answer.id: answer
        for answer in Decoder(target).serve([*requests[:2], damaged, *requests[2:]], max_rows=3)
    }
    assert "no token can be chosen after 0 new tokens" in answers["damaged"].error
    assert answers["damaged"].tokens == [] and answers["damaged"].finish_reason is None
    for number, expected in zip([0, 1, 3, 4, 5, 6], greedy_answers[:6], strict=True):
        if 5 not in expected:  # the answer would read the damaged token itself
            assert answers[number].tokens == expected


def test_one_prompt_is_no_list_of_requests(target) -> None:
    """Each of its letters would be answered."""
    with pytest.raises(UserError, match="put it in a list"):
        Decoder(target).serve("def area(radius):")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention_mask": [[1]]}, "serve does not take attention_mask"),
        ({"seed": [1, 2]}, "serve takes one seed"),
        ({"max_rows": 0}, "max_rows must be at least 1"),
        ({"verifier": "none"}, "none"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(target, options, reason) -> None:
    with pytest.raises(UserError, match=reason):
        list(Decoder(target).serve([[9]], **options))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"generation_config": GenerationConfig(num_beams=2)}, "serve does not take num_beams"),
        ({"generation_config": GenerationConfig(max_time=9.0)}, "serve does not take max_time"),
        ({"num_return_sequences": 2, "temperature": 1}, "serve does not take num_return_sequences"),
        ({"max_time": 9}, "serve does not take max_time"),
        (
            {"logits_processor": [PrefixConstrainedLogitsProcessor(lambda row, ids: [9], 1)]},
            "serve does not take prefix_allowed_tokens_fn",
        ),
    ],
)
def test_what_one_request_cannot_ask_is_its_own_error(target, options, reason) -> None:
    requests = [ServeRequest([9, 10]), ServeRequest([9, 10], options=options)]
    answers = {each.id: each for each in Decoder(target).serve(requests, max_new_tokens=4)}
    assert answers[0].tokens == Decoder(target).generate([9, 10], max_new_tokens=4).sequences[0]
    assert reason in answers[1].error


def test_an_option_that_is_none_is_left_out(target) -> None:
    [answer] = Decoder(target).serve([ServeRequest([9, 10], options={"num_beams": None})])
    assert answer.error is None


@pytest.mark.parametrize("name", ["none", "draft-model", "parallel:own"])
def test_memory_is_bounded_by_the_rows_that_run(target, make_drafter, name, monkeypatch) -> None:
    """200 tiny requests, one of them long: columns and rows are given back when it has left."""
    seen: list[tuple[int, int]] = []
    step = Stepper.step

    def watched(self, session, budget):
        emitted = step(self, session, budget)
        caches = [c for c in (self.cache, getattr(session, "cache", None)) if c is not None]
        seen.append((max(c.keys[0].shape[2] for c in caches), len(self.run.rows)))
        return emitted

    monkeypatch.setattr(Stepper, "step", watched)
    requests = [ServeRequest([9, 8 + n % 50], max_new_tokens=3) for n in range(200)]
    requests[20] = ServeRequest([9] * 180, max_new_tokens=60)
    decoder = decoder_with(name, target, make_drafter)
    decoder.end_ids = frozenset()
    assert len(list(decoder.serve(requests, max_rows=4))) == 200
    columns = [capacity for capacity, _ in seen]
    assert max(columns) > 2 * BLOCK, "the long request needs them"
    assert max(columns[-20:]) == BLOCK
    assert max(rows for _, rows in seen) <= 2 * 4


@pytest.mark.parametrize("name", [more("draft-model"), "eagle3:own"])
def test_a_server_that_is_closed_frees_everything(target, make_drafter, name, monkeypatch) -> None:
    caches = []
    begin = ColumnCache.__init__

    def counted(self, *arguments):
        begin(self, *arguments)
        caches.append(weakref.ref(self))

    monkeypatch.setattr(ColumnCache, "__init__", counted)
    decoder = decoder_with(name, target, make_drafter)
    answers = decoder.serve(mixed_requests(30), max_rows=4)
    next(answers)
    assert any(cache() is not None for cache in caches)
    answers.close()
    gc.collect()
    assert not any(cache() is not None for cache in caches)
    prompt = random_prompts(1)[0]
    assert decoder.generate(prompt).sequences == Decoder(target).generate(prompt).sequences


@pytest.mark.parametrize(
    ("old", "new", "order"),
    [
        ([True, False, True], [True, False, True], [0, 3, 2, 5]),
        ([False, True, False], [True], [3, 1, 2]),  # the other idle row stays
        ([True], [True, True], [0, 1, 2]),
    ],
)
def test_newcomers_take_the_places_of_rows_that_have_ended(old, new, order) -> None:
    assert seats(old, new) == order


@pytest.mark.parametrize(
    ("lengths", "most", "group"),
    [
        ([90, 35, 40, 80], 999, [90, 80]),
        ([40, 90, 35, 80], 999, [40, 35]),
        ([7] * 5, 999, [7] * 5),
        ([7] * 5, 30, [7] * 4),
        ([100, 1, 1, 1], 999, [100]),
    ],
)
def test_a_pass_reads_prompts_of_similar_lengths(target, lengths, most, group) -> None:
    request = Decoder(target).request([9], read_options({}))
    unread = [Ticket(n, replace(request, prompts=[[9] * n])) for n in lengths]
    found = [each.left for each in group_of(unread[0], unread, most)]
    assert found == group
    assert len(found) * max(found) <= (1 + MOST_PADDING) * sum(found)
