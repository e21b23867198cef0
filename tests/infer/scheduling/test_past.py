"""Prompts that begin with a remembered one: the same answers, and only the rest is read."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from tiny import byte_tokenizer, random_prompts, tiny_llama
from transformers import GenerationConfig

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.drafters.history import History
from drafthead.infer.drafters.store_lookup import Earlier, StoreLookup
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.request.options import read_options
from drafthead.infer.scheduling.past import common_prefix
from drafthead.infer.scheduling.request_of import single
from drafthead.infer.scheduling.running_rows import Ticket
from drafthead.infer.serving import ServeRequest

# Those that differ in what they know of a row.
SOME = ["none", "prompt-lookup", "draft-model", "own-layers", "medusa:tree", "hydra:own",
        "eagle3:own", "parallel:own", "parallel:own+lookup"]  # fmt: skip
PREFIX = [9, 10, 11, 12, 9, 10, 13, 14, 9, 10, 11, 20]
RESTS = [[*rest, 9, 10] for rest in random_prompts(8)]
PROMPTS = [[*PREFIX, *rest] for rest in RESTS]
DRAWN = {"temperature": 0.9, "verifier": "match", "seed": 3}


def decoder_with(name: str, target: Target, make_drafter) -> Decoder:
    return Decoder(target, None if name == "none" else make_drafter(name, target))


def chat_decoder() -> Decoder:
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    return Decoder(Target(tiny_llama(vocab_size=len(tokenizer), eos_token_id=end), tokenizer))


def test_greedy_answers_and_drafts_stay_the_same(target, make_drafter, drafter_name) -> None:
    decoder = Decoder(target, make_drafter(drafter_name, target))
    batches = [PROMPTS[:1], PROMPTS[:3], PROMPTS[:1]]  # nothing remembered changes on the way
    expected = [decoder.generate(prompts, max_new_tokens=12) for prompts in batches[:2]]
    decoder.remember(PREFIX)
    for prompts, wanted in zip(batches, [*expected, expected[0]], strict=True):
        found = decoder.generate(prompts, max_new_tokens=12)
        assert found.sequences == wanted.sequences
        if drafter_name != "unsure":  # it learns from every draft when to stop
            assert found.stats.accept_lengths == wanted.stats.accept_lengths
        assert found.stats.reused == len(prompts) * (len(PREFIX) - 1)
        assert wanted.stats.reused == 0


@pytest.mark.parametrize("name", SOME)
def test_a_seed_still_fixes_the_text(target, make_drafter, name) -> None:
    decoder = decoder_with(name, target, make_drafter)
    decoder.remember(PREFIX)
    found = decoder.generate(PROMPTS[:3], max_new_tokens=12, **DRAWN)
    plain = Decoder(target).generate(PROMPTS[:3], max_new_tokens=12, **DRAWN)
    assert found.sequences == plain.sequences and found.stats.reused


@pytest.mark.parametrize("name", ["none", "prompt-lookup", "draft-model", "parallel:own"])
def test_served_answers_stay_the_same(target, make_drafter, name) -> None:
    prompts = [*PROMPTS[:3], *random_prompts(3), *PROMPTS[3:5]]
    longest = Decoder(target).generate(prompts, max_new_tokens=18).sequences
    decoder = decoder_with(name, target, make_drafter)
    decoder.remember(PREFIX)
    requests = [ServeRequest(prompt, max_new_tokens=4 + 2 * n) for n, prompt in enumerate(prompts)]
    answers = sorted(decoder.serve(requests, max_rows=3), key=lambda answer: answer.id)
    for request, answer in zip(requests, answers, strict=True):
        assert answer.tokens == longest[answer.id][: request.max_new_tokens]
    assert [answer.reused for answer in answers[:3]] == [len(PREFIX) - 1] * 3, "one wave"
    assert not any(answer.reused for answer in answers[3:6]), "nothing is common"


def test_steps_and_streams_start_there_too() -> None:
    decoder, messages = chat_decoder(), [{"role": "system", "content": "be brief"}]
    prompt = [*messages, {"role": "user", "content": "hello"}]
    expected = decoder.generate(prompt, max_new_tokens=8)
    decoder.remember(messages)
    stream = decoder.stream(prompt, max_new_tokens=8)
    assert "".join(stream) == expected.texts[0] and stream.stats.reused
    steps = decoder.steps(prompt, max_new_tokens=8)
    assert [token for new in steps for token in new[0]] == expected.sequences[0]
    assert steps.stats.reused == stream.stats.reused
    session = decoder.chat("be brief", max_new_tokens=8)
    assert session.say("hello") == expected.texts[0]
    assert session.reused == stream.stats.reused


def test_what_comes_after_the_common_tokens_of_a_remembered_prompt_does_not_matter() -> None:
    """A chat template goes on after the system prompt, and a tokenizer may join its last token
    with what follows: tokens are compared, not texts."""
    decoder = chat_decoder()
    system = {"role": "system", "content": "be brief"}
    decoder.remember([system])
    tokens = [
        decoder.tokenizer.apply_chat_template(chat, return_dict=False, add_generation_prompt=True)
        for chat in ([system], [system, {"role": "user", "content": "why"}])
    ]
    found = decoder.generate([system, {"role": "user", "content": "why"}], max_new_tokens=1)
    common = common_prefix(*tokens)
    assert common < len(tokens[0]) and found.stats.reused == common - 1


@pytest.mark.parametrize("alike", [0, 1, 7, 8])
def test_the_common_beginning_of_sequences_is_counted(alike: int) -> None:
    one, other = [5] * 8, [5] * alike + [6] * 3
    assert common_prefix(one, other) == common_prefix(tuple(other), one) == alike


def test_only_the_rest_is_read(target, monkeypatch) -> None:
    widths = []
    read = Target.read

    def watched(self, input_ids, *arguments, **options):
        widths.append(input_ids.shape[1])
        return read(self, input_ids, *arguments, **options)

    decoder = Decoder(target)
    decoder.remember(PREFIX)
    monkeypatch.setattr(Target, "read", watched)
    decoder.generate(PROMPTS[0], max_new_tokens=1)
    assert widths == [len(PROMPTS[0]) - len(PREFIX) + 1]


def test_the_longest_of_several_is_taken_until_all_are_forgotten(target) -> None:
    decoder = Decoder(target)
    for length in (4, 9, 6, 9):
        decoder.remember(PREFIX[:length])
    assert len(decoder.memory.pasts) == 3, "nothing is kept twice"

    def reused(*prompts: list[int]) -> int:
        return decoder.generate(list(prompts), max_new_tokens=2).stats.reused

    assert reused(PROMPTS[0]) == 8
    assert reused(PREFIX[:9]) == 8, "the last token is read"
    assert reused([*PREFIX[:7], 60]) == 6
    assert reused(PROMPTS[0], PREFIX[:5]) == 2 * 4
    assert reused(PROMPTS[0], [60, 61]) == 0
    assert reused([*PREFIX[:2], *[60] * 20]) == 0, "it would cost more than it saves"
    decoder.forget()
    assert reused(PROMPTS[0]) == 0


def test_other_weights_have_read_nothing(make_target) -> None:
    target = make_target(seed=0)
    decoder = Decoder(target)
    decoder.remember(PREFIX)
    with torch.no_grad():
        target.model.get_input_embeddings().weight.mul_(-1)
    found = decoder.generate(PROMPTS[0], max_new_tokens=12)
    assert found.sequences == Decoder(target).generate(PROMPTS[0], max_new_tokens=12).sequences
    assert found.stats.reused == 0
    decoder.remember(PREFIX)
    assert decoder.generate(PROMPTS[0], max_new_tokens=1).stats.reused


def test_a_rule_that_decodes_plainly_starts_there_as_well(target, make_drafter) -> None:
    decoder = Decoder(target, make_drafter("eagle3:own", target), adaptive=True)
    decoder.plans.fixed_budget = None  # no tree pays
    options = {"temperature": 0.9, "verifier": "rejection", "max_new_tokens": 16}
    expected = decoder.generate(PROMPTS[:3], **options).sequences
    decoder.remember(PREFIX)
    found = decoder.generate(PROMPTS[:3], **options)
    assert found.sequences == expected and found.stats.reused


def test_rows_of_a_copy_go_on_by_themselves(target, make_drafter) -> None:
    decoder = Decoder(target, make_drafter("prompt-lookup", target))
    decoder.remember(PREFIX)
    first, second = decoder.memory.recall([PROMPTS[0]] * 2, decoder.drafter).session.histories
    first.append(60)
    assert first.tokens == [*PREFIX, 60] and second.tokens == PREFIX
    assert decoder.memory.pasts[0][0].session.histories[0].tokens == PREFIX


@pytest.mark.parametrize("name", ["prompt-lookup", "parallel:own"])
def test_threads_share_what_is_remembered(target, make_drafter, name) -> None:
    decoder = decoder_with(name, target, make_drafter)
    expected = Decoder(target).generate(PROMPTS, max_new_tokens=8).sequences
    decoder.remember(PREFIX)
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda prompt: decoder.generate(prompt, max_new_tokens=8), PROMPTS)
        assert [result.sequences[0] for result in found] == expected


def test_one_prompt_is_remembered_at_a_time(target) -> None:
    with pytest.raises(UserError, match="a request has one prompt, got 2"):
        Decoder(target).remember([PREFIX, PREFIX])


def test_a_turn_takes_the_place_of_the_one_that_it_goes_on_with(target) -> None:
    decoder, prompt = Decoder(target), [9, 10, 11]
    decoder.memory.most_kept = 4
    for turn in range(3):
        (answer,) = decoder.serve([ServeRequest(prompt, id=turn, max_new_tokens=3)])
        prompt = [*prompt, *answer.tokens, 12]
        assert [past.tokens for past, _ in decoder.memory.kept] == [prompt[:-1]]
    list(decoder.serve([ServeRequest([20, 21], max_new_tokens=3)]))
    assert len(decoder.memory.kept) == 2


def test_what_weights_have_read_that_changed_meanwhile_is_not_used_again(make_target) -> None:
    """A row's first columns are of the old weights, its last ones of the new."""
    target = make_target(seed=3)
    decoder, prompt = Decoder(target), [9, 10, 11, 12]
    decoder.memory.most_kept = 4
    rows = decoder.running_rows(2)
    ticket = Ticket(0, decoder.request(prompt, read_options({"max_new_tokens": 4})))
    rows.admit([ticket])
    gains = rows.step()
    with torch.no_grad():
        target.layers[0].mlp.up_proj.weight.mul_(1.5)
    while rows.count:
        gains += rows.step()
    longer = [*prompt, *gains[-1].row.tokens, 13]
    found = decoder.generate([longer], max_new_tokens=4)
    assert len(decoder.memory.kept) == 1 and found.stats.reused == 0
    assert found.sequences == Decoder(target).generate([longer], max_new_tokens=4).sequences


def test_what_only_an_answer_needs_is_not_asked_of_a_remembered_prompt(make_target) -> None:
    """The model's own settings need an end token, which comes with the call."""
    target = make_target()
    target.model.generation_config = GenerationConfig(exponential_decay_length_penalty=(3, 1.5))
    decoder, own_end = Decoder(target), GenerationConfig(eos_token_id=9)
    decoder.end_ids = frozenset()
    expected = decoder.generate(PROMPTS[0], max_new_tokens=8, generation_config=own_end)
    decoder.remember(PREFIX)
    found = decoder.generate(PROMPTS[0], max_new_tokens=8, generation_config=own_end)
    assert found.sequences == expected.sequences and found.stats.reused


def test_a_prompt_that_another_drafter_has_read_stays_with_its_salt(target) -> None:
    reader, lookup = Decoder(target), StoreLookup(None, Earlier())
    request = replace(single(reader.request(PROMPTS[0], read_options({}))), cache_salt="mine")
    run = BatchRun(request, target.device)
    past = replace(reader.method(run).read(run, None), salt="mine")
    reader.memory.add(past, reader.memory.state())
    assert reader.memory.recall(PROMPTS[:1], lookup) is None
    assert reader.memory.recall(PROMPTS[:1], lookup, "mine") is not None
    for salt, length in (("", 0), ("mine", 4)):
        known = History(PROMPTS[0][0], salt)
        known.tokens += PROMPTS[0][1:4]
        assert lookup.earlier.matched(known) == length
