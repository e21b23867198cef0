"""Beam search with drafts finds what `model.generate(num_beams=...)` finds, in float32."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tiny import END, VOCAB, byte_tokenizer, random_prompts, tiny_llama
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, TextStreamer

from drafthead.core.errors import UserError
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.target import Target
from drafthead.core.trees.guesses import known
from drafthead.core.trees.tree import Budget
from drafthead.infer import Decoder
from drafthead.infer.beams.beam_round import BeamRules, Beams, is_over
from drafthead.infer.beams.beam_search import BeamStepper
from drafthead.infer.drafters.draft_model import DraftModel
from drafthead.infer.drafters.store_lookup import Earlier, StoreLookup
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.planning.planner import FixedPlan
from drafthead.infer.request.options import read_options
from drafthead.infer.verifiers import verifier_for
from drafthead.lab.tracing import trace

PROMPTS = random_prompts(3)  # of different lengths
MAX_NEW = 12
TREE = Budget(25, 3)
ENDS = [END, 10, 36]  # so many that beams end at all lengths
GREEDY = SamplingConfig(temperature=0.0)
Found = list[tuple[list[int], float]]


def found_by_transformers(
    model: PreTrainedModel, prompts: list[list[int]], **options: Any
) -> Found:
    """Each answer with its score."""
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    output = model.generate(
        torch.tensor([[0] * n + prompt for n, prompt in zip(padding, prompts, strict=True)]),
        attention_mask=torch.tensor([[0] * n + [1] * (longest - n) for n in padding]),
        do_sample=False, return_dict_in_generate=True, output_scores=True,
        **{"max_new_tokens": MAX_NEW, "eos_token_id": ENDS} | options,
    )  # fmt: skip
    answers = map(until_end, output.sequences[:, longest:].tolist())
    return [*zip(answers, output.sequences_scores.tolist(), strict=True)]


def until_end(tokens: list[int]) -> list[int]:
    """The tokens up to the first end token."""
    places = [place for place, token in enumerate(tokens) if token in ENDS]
    return tokens[: places[0] + 1] if places else tokens


def found_here(decoder: Decoder, prompts: list[list[int]], **options: Any) -> Found:
    own = {"max_new_tokens": MAX_NEW, "generation_config": GenerationConfig(eos_token_id=ENDS)}
    result = decoder.generate(prompts, **own | options)
    assert result.scores is not None
    return [*zip(result.sequences, result.scores, strict=True)]


def assert_same(found: Found, expected: Found) -> None:
    assert [answer for answer, _ in found] == [answer for answer, _ in expected]
    assert [score for _, score in found] == pytest.approx([s for _, s in expected], rel=1e-4)


@pytest.fixture(scope="module")
def decoders(target, make_drafter) -> dict[str, Decoder]:
    """The target alone, and as its own draft model."""
    return {"none": Decoder(target), "self": Decoder(target, make_drafter("self", target), TREE)}


@pytest.fixture(scope="module")
def expected(target) -> Found:
    """The best answer to each prompt, of four beams."""
    return found_by_transformers(target.model, PROMPTS, num_beams=4)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("beams", [2, 4, 8])
def test_answers_and_scores_are_those_of_transformers(
    target, decoders, beams, length_penalty, early_stopping
) -> None:
    options = {
        "num_beams": beams, "num_return_sequences": beams,
        "length_penalty": length_penalty, "early_stopping": early_stopping,
    }  # fmt: skip
    expected = found_by_transformers(target.model, PROMPTS, **options)
    for name in ("none", "self"):
        assert_same(found_here(decoders[name], PROMPTS, **options), expected)


def test_the_options_that_are_tested_change_what_is_found(target) -> None:
    options: list[dict[str, Any]] = [
        {"early_stopping": False}, {"early_stopping": True}, {"early_stopping": "never"},
        {"length_penalty": -1.0}, {"length_penalty": 0.0}, {"length_penalty": 2.0},
    ]  # fmt: skip
    found = [
        found_by_transformers(target.model, PROMPTS, num_beams=4, num_return_sequences=4, **each)
        for each in options
    ]
    assert len(set(map(str, found))) == len(options)


@pytest.mark.parametrize("rows", [1, 3])
def test_any_drafter_finds_the_same(target, make_drafter, drafter_name, expected, rows) -> None:
    decoder = Decoder(target, make_drafter(drafter_name, target))
    found = found_here(decoder, PROMPTS[:rows], num_beams=4)
    assert_same(found, expected[:rows])


def test_each_beam_drafts_as_a_prompt_of_the_same_text_would(
    target, make_drafter, drafter_name
) -> None:
    """What a drafter knows of a beam follows it through the rows, by way of all its ancestors."""
    drafter = make_drafter(drafter_name, target)
    decoder = Decoder(target, drafter)
    stepper = stepper_of(decoder, PROMPTS)
    budget = drafter.budgets[-1]
    with torch.no_grad():
        session, _ = stepper.begin(drafter, None)
        for _ in range(4):
            stepper.step(session, FixedPlan(budget))
        drafted = known(session.propose(budget, GREEDY, None))
        prompts = [PROMPTS[each.number] for each in stepper.searches for _ in range(4)]
        texts = [
            [*prompt, *answer] for prompt, answer in zip(prompts, stepper.answers(), strict=True)
        ]
        fresh = stepper_of(decoder, [text[:-1] for text in texts])
        alone = drafter.start(fresh.prompt_ids, fresh.prompt_lengths)
        roots = [text[-1] for text in texts]
        alone.commit(fresh.pass_over_prompts().committed(torch.tensor(roots), roots))
        expected = known(alone.propose(budget, GREEDY, None))
    assert len(texts) > 4 and drafted.tokens.equal(expected.tokens)
    assert drafted.parents.equal(expected.parents)


def stepper_of(decoder: Decoder, prompts: list[list[int]]) -> BeamStepper:
    settings = read_options({"num_beams": 4, "max_new_tokens": 64})
    run = BatchRun(decoder.request(prompts, settings), decoder.target.device)
    assert decoder.drafter is not None
    rule = verifier_for("greedy", 0.0)
    return BeamStepper(decoder.target, run, decoder.drafter.features, rule, max_nodes=32)


@pytest.mark.parametrize("beams", [2, 4])
def test_a_draft_that_knows_the_target_makes_several_rounds_a_pass(decoders, beams) -> None:
    stats = decoders["self"].generate(PROMPTS, max_new_tokens=24, num_beams=beams).stats
    assert stats.tau > 1.3
    assert [sum(rounds) for rounds in stats.accept_lengths] == stats.decoded_tokens
    assert stats.steps == max(map(len, stats.accept_lengths))
    plain = decoders["none"].generate(PROMPTS, max_new_tokens=24, num_beams=beams).stats
    assert plain.tau == 1.0 and plain.verified_nodes == plain.steps == max(plain.decoded_tokens)


def test_the_planner_sizes_the_trees_of_beams(target, make_drafter, expected) -> None:
    decoder = Decoder(target, make_drafter("self", target), adaptive=True)
    for _ in range(3):
        assert_same(found_here(decoder, PROMPTS, num_beams=4), expected)
    assert decoder.plans is not None
    assert {kind.rule for kind, *_ in decoder.plans.plans} == {"4 beams"}


class OnlyAfter(LogitsProcessor):
    """Forbids every token after an odd one but the next two: paths of a tree may end dead."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = input_ids[:, -1:]
        tokens = torch.arange(scores.shape[-1])
        kept = (last % 2 == 0) | ((tokens > last) & (tokens < last + 3))
        return scores.masked_fill(~kept, -torch.inf)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 9, "forced_eos_token_id": END},
        {"renormalize_logits": True, "suppress_tokens": [9, 12]},
        {"logits_processor": [OnlyAfter()]},
    ],
)
def test_logits_processors_change_log_probabilities(target, decoders, options) -> None:
    # One by one: transformers' processors also see the padding of a batch.
    config = dict(options)
    custom = config.pop("logits_processor", [])
    given = {"num_beams": 4, "num_return_sequences": 4}
    for prompt in PROMPTS[:2]:
        expected = found_by_transformers(target.model, [prompt], **given, **options)
        found = found_here(
            decoders["self"], [prompt], **given, logits_processor=custom,
            generation_config=GenerationConfig(**config, eos_token_id=ENDS),
        )  # fmt: skip
        assert_same(found, expected)


def test_where_there_are_fewer_answers_than_asked_what_fills_up_has_an_impossible_score(
    target, decoders
) -> None:
    others = [token for token in range(VOCAB) if token != END]
    given = {"num_beams": 2, "num_return_sequences": 2}
    expected = found_by_transformers(target.model, PROMPTS, **given, suppress_tokens=others)
    config = GenerationConfig(suppress_tokens=others, eos_token_id=ENDS)
    found = found_here(decoders["self"], PROMPTS, **given, generation_config=config)
    assert [score for _, score in found] == pytest.approx([score for _, score in expected])
    assert found[0][0] == [END] and found[1][1] < -1e8


def test_of_equal_scores_the_same_are_taken_as_in_transformers() -> None:
    model = tiny_llama(0, eos_token_id=END, pad_token_id=0)
    weight = model.lm_head.weight.data
    weight[VOCAB // 2 :] = weight[: VOCAB // 2]  # each token has a twin that is as probable
    target = Target(model)
    decoder = Decoder(target, DraftModel(target, target, depth=3), TREE)
    options = {"num_beams": 4, "num_return_sequences": 4}
    expected = found_by_transformers(model, PROMPTS, **options)
    assert len({score for _, score in expected}) < len(expected)
    assert_same(found_here(decoder, PROMPTS, **options), expected)


def test_a_context_that_ends_cuts_answers_as_a_limit_does(make_drafter) -> None:
    model = tiny_llama(0, eos_token_id=END, max_position_embeddings=16)
    target, prompt = Target(model), list(range(8, 17))
    decoder = Decoder(target, DraftModel(target, target, depth=3), TREE)
    options = {"num_beams": 3, "num_return_sequences": 3}
    expected = found_by_transformers(model, [prompt], **options, max_new_tokens=7)
    assert_same(found_here(decoder, [prompt], **options), expected)


def test_what_is_remembered_is_not_read_again(target, make_drafter) -> None:
    prefix = random_prompts(9)[-1] + list(range(8, 30))
    prompts = [prefix + prompt for prompt in PROMPTS]
    decoder = Decoder(target, make_drafter("eagle:tree", target))
    before = decoder.generate(prompts, max_new_tokens=MAX_NEW, num_beams=4)
    decoder.remember(prefix)
    after = decoder.generate(prompts, max_new_tokens=MAX_NEW, num_beams=4)
    assert after.stats.reused == 3 * (len(prefix) - 1)
    assert after.sequences == before.sequences and after.scores == pytest.approx(before.scores)
    assert after.stats.accept_lengths == before.stats.accept_lengths


def test_the_best_answer_alone_is_the_default(target, decoders) -> None:
    result = decoders["self"].generate(PROMPTS, max_new_tokens=MAX_NEW, num_beams=4)
    every = decoders["self"].generate(
        PROMPTS, max_new_tokens=MAX_NEW, num_beams=4, num_return_sequences=4
    )
    assert result.sequences == every.sequences[::4] and result.scores == every.scores[::4]
    assert every.prompt_lengths == [len(prompt) for prompt in PROMPTS for _ in range(4)]
    for answer, reason in zip(every.sequences, every.finish_reasons, strict=True):
        assert reason == ("end_token" if answer[-1] == END else "length")


def test_one_beam_is_greedy_decoding(decoders) -> None:
    one = decoders["self"].generate(PROMPTS, max_new_tokens=MAX_NEW, num_beams=1)
    greedy = decoders["none"].generate(PROMPTS, max_new_tokens=MAX_NEW)
    assert one.sequences == greedy.sequences and one.scores is None


def test_logits_that_are_nan_are_an_error_that_names_the_prompt() -> None:
    model = tiny_llama(0)
    model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(UserError, match="after 0 new tokens of prompt 0: the target's logits"):
        Decoder(Target(model)).generate(PROMPTS, num_beams=2)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num_beams": 9}, "num_beams must be at most 8, got 9"),
        ({"num_beams": 0}, "num_beams must be at least 1, got 0"),
        ({"num_beams": 2.0}, "num_beams must be an integer"),
        ({"num_beams": 2, "num_return_sequences": 3}, "between 1 and num_beams=2, got 3"),
        ({"num_beams": 2, "temperature": 1.0}, "beam search does not sample"),
        ({"num_beams": 2, "verifier": "greedy"}, "num_beams cannot be combined with a verifier"),
        ({"num_beams": 2, "logprobs": 0}, "num_beams cannot be combined with logprobs"),
        ({"num_beams": 2, "max_time": 1.0}, "num_beams cannot be combined with max_time"),
        ({"num_beams": 2, "stop_strings": "x"}, "num_beams cannot be combined with stop_strings"),
        ({"num_beams": 2, "streamer": TextStreamer(byte_tokenizer())}, "combined with streamer"),
        ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping must be True, False or"),
        ({"num_beams": 2, "length_penalty": "1"}, "length_penalty must be a number"),
        ({"length_penalty": 2.0}, "length_penalty=2.0 needs num_beams above 1"),
        ({"early_stopping": True}, "early_stopping=True needs num_beams above 1"),
    ],
)
def test_what_does_not_go_with_beams_is_refused(target, options, complaint) -> None:
    with pytest.raises(UserError, match=complaint):
        Decoder(target).generate([9, 10], **options)


@pytest.mark.parametrize(
    "options",
    [
        {"diversity_penalty": 0.5},
        {"num_beam_groups": 2},
        {"constraints": [1]},
        {"low_memory": True},
    ],
)
def test_other_kinds_of_beam_search_are_refused_by_name(target, options) -> None:
    config = GenerationConfig(num_beams=4, **options)
    with pytest.raises(UserError, match=f"generation_config sets {next(iter(options))}"):
        Decoder(target).generate([9, 10], generation_config=config)


def test_beams_are_an_option_of_generate_alone(target) -> None:
    decoder = Decoder(Target(target.model, byte_tokenizer()))
    config = {"generation_config": GenerationConfig(num_beams=2)}
    for call in (decoder.stream, decoder.steps, partial(trace, decoder)):
        with pytest.raises(UserError, match="num_beams is an option of generate alone"):
            call([9, 10], **config)
    with pytest.raises(UserError, match="num_beams is an option of generate alone"):
        decoder.warm_up(**config)
    with pytest.raises(UserError, match="serve does not take num_beams"):
        decoder.serve([[9, 10]], **config)
    with pytest.raises(UserError, match="chat does not take num_beams"):
        decoder.chat(num_beams=2)


def test_beams_are_not_learnt_as_answers(target) -> None:
    decoder = Decoder(target, StoreLookup(None, Earlier()))
    with pytest.raises(UserError, match="num_beams cannot be combined with drafts from answers"):
        decoder.generate([9, 10], num_beams=2)


def test_with_a_negative_penalty_never_goes_on_by_the_present_length() -> None:
    """At the limit the best beam would be worse: -1 x 10 is below -3, and -1 x 2 is not."""
    rules = BeamRules(2, -1.0, "never", frozenset([END]), limit=10)
    beams = Beams(
        running=[(9, 9), (9, 8)], scores=torch.tensor([-1.0, -4.0]), ended=[(END,), (8, END)],
        ended_scores=torch.tensor([-2.5, -3.0]), has_ended=torch.tensor([True, True]),
    )  # fmt: skip
    assert not is_over(beams, rules)
    assert is_over(replace(beams, scores=torch.tensor([-2.0, -4.0])), rules)
