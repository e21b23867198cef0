"""Rows of one batch are sampled each in its own way, and get the answers that they get alone."""

from dataclasses import fields
from typing import Any

import pytest
from rehearsal import rehearse
from tiny import random_prompts
from transformers import GenerationConfig

from drafthead.backends.cuda.recorded_target import RecordedTarget
from drafthead.core.sampling import SamplingConfig
from drafthead.infer import Decoder
from drafthead.infer.engine.stepper import Stepper
from drafthead.infer.request.options import DecodeOptions, read_options
from drafthead.infer.request.request import TOKENIZED, Request
from drafthead.infer.scheduling.tickets import Ticket, Way, batch_of

DRAWN: list[DecodeOptions] = [
    {"temperature": 0.3},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 7},
    {"temperature": 1.2, "top_p": 0.8},
    {"generation_config": GenerationConfig(do_sample=True, temperature=0.9, min_p=0.05)},
]
MIXED: list[DecodeOptions] = [{}, *DRAWN, {}]
TYPICAL: DecodeOptions = {"generation_config": GenerationConfig(do_sample=True, typical_p=0.7)}
PENALISED = {"generation_config": GenerationConfig(repetition_penalty=1.3)}
# The others differ in what they know of a row, not in how they draw.
SOME = [
    "none", "draft-model", "eagle3:own", "parallel:own+lookup",
    *(pytest.param(name, marks=pytest.mark.thorough)
      for name in ("prompt-lookup", "medusa:tree", "hydra:own", "parallel:own")),
]  # fmt: skip
RULES = [
    ("rejection", "draft-model"), ("match", "medusa:tree"), ("rejection", "prompt-lookup"),
    *(pytest.param(rule, name, marks=pytest.mark.thorough)
      for rule in ("match", "rejection", "traversal", "typical", "lenient")
      for name in ("draft-model", "medusa:tree", "eagle3:own", "prompt-lookup")),
]  # fmt: skip


def answers_and_sizes(
    decoder: Decoder, options: list[DecodeOptions]
) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of requests with these options, and the rows of all batches, step by step."""
    rows, sizes, found = decoder.running_rows(8), [], {n: [] for n in range(len(options))}
    prompts = random_prompts(len(options))
    rows.admit([
        Ticket(n, decoder.request(prompt, read_options({"seed": n, **each})))
        for n, (prompt, each) in enumerate(zip(prompts, options, strict=True))
    ])  # fmt: skip
    while rows.count:
        for gain in rows.step():
            found[gain.ticket.id] += gain.tokens
        if not rows.prompts.count:
            sizes.append([batch.count for batch in rows.batches])
    return [*found.values()], sizes


def answers_alone(decoder: Decoder, options: list[DecodeOptions]) -> list[list[int]]:
    pairs = zip(random_prompts(len(options)), options, strict=True)
    return [
        decoder.generate(prompt, seed=n, **each).sequences[0] for n, (prompt, each) in
        enumerate(pairs)
    ]  # fmt: skip


def with_length(options: list[DecodeOptions], **more: Any) -> list[DecodeOptions]:
    return [{**each, "max_new_tokens": 6 + 3 * n, **more} for n, each in enumerate(options)]


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("way", ["eager", "recorded"])
def test_greedy_and_drawn_rows_share_a_batch(name, way, target, make_drafter, monkeypatch) -> None:
    """Also where all that draw have ended."""
    drafter = None if name == "none" else make_drafter(name, target)
    if way == "recorded":
        rehearse(monkeypatch)
    decoder = Decoder(target if way == "eager" else RecordedTarget(target), drafter)
    options = with_length(MIXED)
    found, sizes = answers_and_sizes(decoder, options)
    rule = decoder.rule(decoder.request([9], read_options({"temperature": 1.0})))
    most = 1 if rule.name == "match" else 2  # rows of another rule are apart from greedy ones
    assert all(len(batches) <= most for batches in sizes) and max(map(max, filter(None, sizes))) > 1
    assert found == answers_alone(decoder, options)


@pytest.mark.parametrize(("rule", "name"), RULES)
def test_rows_of_each_rule_draw_their_own_children(rule, name, target, make_drafter) -> None:
    decoder = Decoder(target, make_drafter(name, target))
    # One law of two rows, which must not get each other's.
    options = with_length([*DRAWN, DRAWN[1], TYPICAL], verifier=rule)
    found, sizes = answers_and_sizes(decoder, options)
    assert all(len(batches) <= 2 for batches in sizes), "graphs do not know typical_p"
    assert max(map(max, filter(None, sizes))) > 1
    assert found == answers_alone(decoder, options)


def test_processed_and_recorded_rows_of_several_laws_share_a_batch(target, make_drafter) -> None:
    decoder = Decoder(target, make_drafter("parallel:own", target))
    penalised = [{**PENALISED, "temperature": t} for t in (None, 0.5, 1.0)]
    for options in (with_length(penalised, verifier="auto"), with_length(MIXED, logprobs=2)):
        found, _ = answers_and_sizes(decoder, options)
        assert found == answers_alone(decoder, options)
    options = with_length([{"temperature": 0.5}, {"temperature": 1.0, "top_k": 3}], logprobs=2)
    requests = [decoder.request([9, 10], read_options(each)) for each in options]
    run = batch_of([Ticket(n, each) for n, each in enumerate(requests)], target.device)
    assert run.sampling.rows == (SamplingConfig(0.5), SamplingConfig(1.0, top_k=3))
    stepper = Stepper(target, run, decoder.drafter.features, decoder.rule(requests[0]))
    stepper.prefill()
    for number, each in enumerate(options):
        alone = decoder.generate([9, 10], **each).logprobs[0].processed[0]
        assert run.record.rows[number].processed == pytest.approx([alone], abs=1e-4)


def test_what_cannot_be_rows_of_one_batch_stays_apart(target, make_drafter) -> None:
    decoder = Decoder(target, make_drafter("eagle3:own", target))

    def way(**options: Any) -> Way:
        request = decoder.request([9], read_options(options))
        return Way.of(request, decoder.rule(request))

    assert way(temperature=0.5) == way(temperature=1.0, top_k=3, seed=8) == way()
    assert way(temperature=0.5, verifier="rejection") == way(temperature=1, verifier="rejection")
    apart = [
        way(), way(**PENALISED), way(logprobs=1), way(logprobs=2), way(**TYPICAL),
        way(temperature=1, verifier="rejection"), way(temperature=1, verifier="typical"),
    ]  # fmt: skip
    assert len({*apart}) == len(apart)


# What becomes of each field of a request whose row shares a batch with rows of other requests.
FIELDS = {
    "the row's own": {"prompts", "limits", "seeds", "processors", "stops", "prefixes", "sampling",
                      "drafts", "cache_salt"},
    "the way, which rows share": {"verifier", "rule_options", "end_ids", "logprobs", "new_record"},
    "the decoder's": {"draft_temperature"},
    "for reading the prompt": {"prefill_chunk_size"},
    "read into others": {"max_new_tokens", "max_length", "seed", "stop_strings", "eos_token_id",
                         "logits_processor", "stopping_criteria", "generation_config",
                         "use_model_defaults", "chat_template_kwargs"},
    "of one call": {*TOKENIZED, "attention_mask", "beams", "continue_final_message", "max_time",
                    "num_return_sequences", "streamer"},
}  # fmt: skip


def test_every_field_of_a_request_has_a_place_in_a_batch() -> None:
    """A new one that has none would be, for all rows, that of the first."""
    placed = [name for names in FIELDS.values() for name in names]
    assert sorted(placed) == sorted(each.name for each in fields(Request))
