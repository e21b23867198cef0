"""`model.generate(custom_generate=...)` returns what `model.generate` returns without it."""

from typing import Any

import pytest
import torch
from listening import Listener
from tiny import END, byte_tokenizer, random_prompts, tiny_llama
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import DynamicCache
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from drafthead.core.errors import UserError
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.custom_generate import CACHE_INPUT, without_filters

WAYS = ["plain", "medusa:tree", "draft-model", "self"]
PROMPTS = random_prompts(3)  # of different lengths
LONGEST = max(map(len, PROMPTS))


class ByLength(LogitsProcessor):
    """A user's own, which counts the padding."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 3 * torch.sin(torch.arange(scores.shape[-1]) * input_ids.shape[1])


class SumOfAll(StoppingCriteria):
    """A user's own: stops a row when the sum of its tokens is a multiple of seven."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.sum(-1) % 7 == 0


def padded(side: int = 0) -> dict[str, torch.Tensor]:
    """The prompts as rows that are padded at the left."""
    rows = [[side] * (LONGEST - len(prompt)) + prompt for prompt in PROMPTS]
    mask = [[0] * (LONGEST - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


CALLS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "length with the prompt": {"max_new_tokens": None, "max_length": LONGEST + 9},
    "several ends": {"eos_token_id": [END, 20, 40, 52]},
    "repetition penalty": {"repetition_penalty": 1.3},
    "n-grams": {"no_repeat_ngram_size": 2},
    "least length": {"min_new_tokens": 12, "eos_token_id": [END, 20, 40]},
    "first and last": {"begin_suppress_tokens": list(range(40)), "forced_eos_token_id": 9},
    "growing wish to end": {"exponential_decay_length_penalty": (2, 1.5)},
    "bad words": {"bad_words_ids": [[n] for n in range(20, 40)]},
    "own processor": {"logits_processor": LogitsProcessorList([ByLength()])},
    "own criterion": {"stopping_criteria": StoppingCriteriaList([SumOfAll()])},
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda row, ids: [*range(8 + 5 * row, 60)]},
    "config": {
        "max_new_tokens": None,
        "generation_config": GenerationConfig(max_new_tokens=9, repetition_penalty=1.2),
    },
    "watermark": {"watermarking_config": {"bias": 2.5, "seeding_scheme": "lefthash"}},
}


@pytest.fixture(scope="module")
def target(make_target) -> Target:
    """A target of its own: the tests change its generation config."""
    return make_target(seed=0)


@pytest.fixture(scope="module")
def callables(target, make_drafter):
    """What `custom_generate` gets, for each way of decoding."""
    drafters = {way: None if way == "plain" else make_drafter(way, target) for way in WAYS}
    return {way: Decoder(target, each).as_custom_generate() for way, each in drafters.items()}


@pytest.mark.parametrize("name", CALLS)
def test_greedy_answers_equal_those_of_transformers(target, callables, name) -> None:
    call = {"max_new_tokens": 15, "do_sample": False} | CALLS[name]
    call = {option: value for option, value in call.items() if value is not None}
    unchanged = target.model.generate(**padded(), max_new_tokens=15, do_sample=False)
    for inputs in (padded(), {"input_ids": torch.tensor(PROMPTS[:1])}):
        expected = target.model.generate(**inputs, **call)
        if "attention_mask" in inputs and name != "nothing":
            assert not expected.equal(unchanged), "a setting that changes nothing tests nothing"
        for way, function in callables.items():
            found = target.model.generate(**inputs, **call, custom_generate=function)
            assert found.equal(expected), way


def test_the_models_own_config_is_used(target, callables, monkeypatch) -> None:
    own = GenerationConfig(
        eos_token_id=[END, 52], pad_token_id=0, repetition_penalty=1.3, max_new_tokens=12
    )
    monkeypatch.setattr(target.model, "generation_config", own)
    expected = target.model.generate(**padded())
    assert target.model.generate(**padded(), custom_generate=callables["self"]).equal(expected)


@pytest.mark.parametrize("way", WAYS)
def test_scores_and_logits_are_those_of_transformers(target, callables, way) -> None:
    call = padded() | {
        "max_new_tokens": 12, "repetition_penalty": 1.2, "return_dict_in_generate": True,
        "output_scores": True, "output_logits": True,
    }  # fmt: skip
    expected = target.model.generate(**call)
    found = target.model.generate(**call, custom_generate=callables[way])
    assert type(found) is type(expected) and found.sequences.equal(expected.sequences)
    going_on = expected.sequences[:, LONGEST:].roll(1, 1) != END
    going_on[:, 0] = True
    going_on = going_on.int().cumprod(1).bool()
    for kind in ("scores", "logits"):
        there, here = torch.stack(expected[kind], 1), torch.stack(found[kind], 1)
        assert here.shape == there.shape
        torch.testing.assert_close(here[going_on], there[going_on], atol=1e-4, rtol=1e-4)
        assert not here[~going_on].any(), "nothing is computed for rows that have ended"
    call["output_scores"] = False
    assert target.model.generate(**call, custom_generate=callables[way]).scores is None


FILTERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8, "top_k": 0, "temperature": 1.5},
    "min-p and typical": {"min_p": 0.02, "typical_p": 0.9, "top_k": 40, "top_p": 0.99},
    "top-h before others": {"top_h": 0.8, "temperature": 1.3, "top_k": 20, "top_p": 0.9},
    "epsilon and eta after others": {"epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "top_k": 20},
    "penalty": {"repetition_penalty": 1.3, "top_k": 10},
    "normalised": {"renormalize_logits": True, "temperature": 0.7},
    "own filters": {"logits_processor": LogitsProcessorList([ByLength()]), "top_p": 0.9},
}


@pytest.mark.parametrize("name", FILTERS)
def test_samples_are_drawn_from_the_processed_law_of_transformers(
    target, callables, name, monkeypatch
) -> None:
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", None)
    torch.manual_seed(0)
    call = padded() | {
        "max_new_tokens": 8, "do_sample": True, "return_dict_in_generate": True,
        "output_scores": True, "output_logits": True,
    } | FILTERS[name]  # fmt: skip
    prepared: dict[str, Any] = {}

    def spy(model, input_ids, **others):
        prepared.update(others)

    target.model.generate(**call, custom_generate=spy)
    for way in ("plain", "medusa:tree"):
        found = target.model.generate(**call, custom_generate=callables[way])
        for step, (scores, logits) in enumerate(zip(found.scores, found.logits, strict=True)):
            past = found.sequences[:, : LONGEST + step]
            expected = prepared["logits_processor"](past, logits.clone())
            drawn = found.sequences[:, LONGEST + step, None]
            torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
            assert (scores.gather(1, drawn) > -torch.inf).all(), way


def test_filters_of_transformers_become_those_of_the_engine() -> None:
    """As processors they would do the same, but slowly and outside of graphs."""
    own = ByLength()
    filters = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(9), TopPLogitsWarper(0.8)]
    assert without_filters([own, *filters]) == ([own], SamplingConfig(0.7, 9, 0.8))
    assert without_filters(filters[::-1]) == (filters[:0:-1], SamplingConfig(0.7))
    several = TopKLogitsWarper(9, min_tokens_to_keep=2)
    assert without_filters([several]) == ([several], SamplingConfig(1.0))


def test_torchs_seed_fixes_samples_and_several_answers_differ(target, callables) -> None:
    call = padded() | {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 2}
    answers = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        answers.append(target.model.generate(**call, custom_generate=callables["self"]))
    assert answers[0].equal(answers[1]) and not answers[0].equal(answers[2])
    assert answers[0].shape == (6, LONGEST + 12) and not answers[0][0].equal(answers[0][1])


@pytest.mark.parametrize("way", WAYS)
def test_a_streamer_hears_what_it_hears_in_transformers(target, callables, way) -> None:
    """transformers does not hand the streamer on to a callable."""
    there, here = Listener(), Listener()
    call = {"input_ids": torch.tensor(PROMPTS[:1]), "max_new_tokens": 12}
    target.model.generate(**call, streamer=there)
    target.model.generate(**call, streamer=here, custom_generate=callables[way])
    assert here.heard == there.heard and here.heard[-1] == "end"


def test_texts_stop_at_strings_and_times_of_transformers(make_target, make_drafter) -> None:
    """Without its tokenizer argument, which it does not hand on, transformers wants criteria."""
    tokenizer = byte_tokenizer()
    target = Target(make_target(vocab=260).model, tokenizer)
    inputs = tokenizer(["hello", "hi"], padding=True, padding_side="left", return_tensors="pt")
    call = {**inputs, "max_new_tokens": 30}
    longest = inputs["input_ids"].shape[1]
    text, _ = tokenizer.batch_decode(target.model.generate(**call)[:, longest:])
    strings = StopStringCriteria(tokenizer, [text[5:7], "never written"])
    function = Decoder(target, make_drafter("self", target)).as_custom_generate()
    for criterion in (strings, MaxTimeCriteria(1e-9), MaxTimeCriteria(1e9)):
        call["stopping_criteria"] = StoppingCriteriaList([criterion])
        expected = target.model.generate(**call)
        assert target.model.generate(**call, custom_generate=function).equal(expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4},
        {
            "num_beams": 4,
            "num_return_sequences": 3,
            "length_penalty": 0.3,
            "repetition_penalty": 1.3,
        },
        {"num_beams": 2, "num_return_sequences": 2, "early_stopping": True, "pad_token_id": 3},
    ],
)
def test_beams_are_those_of_transformers(target, callables, way, options) -> None:
    call = padded() | {"max_new_tokens": 9, "eos_token_id": [END, 10, 36]} | options
    expected = target.model.generate(**call)
    assert target.model.generate(**call, custom_generate=callables[way]).equal(expected)
    call |= {"return_dict_in_generate": True, "output_scores": True}
    found = target.model.generate(**call, custom_generate=callables[way])
    assert found.sequences.equal(expected)
    scores = target.model.generate(**call).sequences_scores
    torch.testing.assert_close(found.sequences_scores, scores)


def full_cache(model) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(torch.tensor([[9, 8]]), **{CACHE_INPUT: cache})
    return cache


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (lambda t: {"num_beams": 9}, "num_beams must be at most 8, got 9"),
        (lambda t: {"num_beams": 2, "do_sample": True}, "beam search does not sample"),
        (lambda t: {"num_beams": 2, "output_logits": True}, "cannot be combined with num_beams"),
        (lambda t: {"num_beams": 2, "max_time": 9.0}, "cannot be combined with MaxTimeCriteria"),
        (lambda t: {"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        (lambda t: {"assistant_confidence_threshold": 0.1}, "assistant_confidence_threshold=0.1"),
        (lambda t: {"assistant_model": t.model}, "assistant_model"),
        (lambda t: {"output_hidden_states": True}, "output_hidden_states"),
        (lambda t: {"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance.* remembers"),
        (lambda t: {CACHE_INPUT: full_cache(t.model)}, f"tokens in {CACHE_INPUT}"),
        (lambda t: {"position_ids": torch.arange(3, 3 + LONGEST)[None]}, "position_ids must count"),
        (lambda t: {"streamer": Listener()}, "a streamer takes one answer, got 3"),
        (lambda t: {"attention_mask": torch.zeros(3, LONGEST).long()}, "prompt 0 is empty"),
        (lambda t: {"inputs_embeds": torch.zeros(3, LONGEST, 32)}, "inputs_embeds"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(target, callables, options, complaint) -> None:
    call = padded() | {"max_new_tokens": 4} | options(target)
    with pytest.raises(UserError, match=complaint):
        target.model.generate(**call, custom_generate=callables["plain"])


def test_another_model_is_refused(callables) -> None:
    with pytest.raises(UserError, match="another model"):
        tiny_llama(1).generate(
            torch.tensor([[1, 2]]), max_new_tokens=2, custom_generate=callables["plain"]
        )


def test_a_loaded_model_becomes_a_target_as_it_is(target) -> None:
    decoder = Decoder.from_pretrained(target.model, draft="lookup", tree_nodes=4)
    assert decoder.target.model is target.model
    call = {"input_ids": torch.tensor(PROMPTS[:1]), "max_new_tokens": 9}
    found = target.model.generate(**call, custom_generate=decoder.as_custom_generate())
    assert found.equal(target.model.generate(**call))
    assert Decoder.from_pretrained(target).target is target
    with pytest.raises(UserError, match="dtype=float32 is for models that are loaded by name"):
        Decoder.from_pretrained(target.model, dtype="float32")
    with pytest.raises(UserError, match="got 5: names are head:PATH"):
        Decoder.from_pretrained(target.model, draft=5)
