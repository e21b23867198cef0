"""Stop strings and stopping criteria: every way of decoding ends where `model.generate` does."""

import itertools

import pytest
import torch
from hidden_answers import generated
from stages import more
from tiny import END, VOCAB, random_prompts
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.request.stopping import GrowingText, stops_for

MAX_NEW = 40
PROMPTS = random_prompts(3)
DRAFTERS = ["plain", "medusa:tree", "medusa:chain", "self", "prompt-lookup"]


class EveryEleventh(StoppingCriteria):
    """A user's own: stops when the sum of all tokens is a multiple of eleven."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.sum(-1) % 11 == 0


@pytest.fixture(scope="module")
def target(make_target) -> Target:
    """A target whose tokens are the words of one, two and three letters of an alphabet of four."""
    words = ["".join(w) for n in (1, 2, 3) for w in itertools.product("abcd", repeat=n)]
    words = [*words[:END], "<end>", *words[END : VOCAB - 1]]
    tokenizer = Tokenizer(models.BPE(vocab={w: n for n, w in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    return Target(make_target(seed=0).model, fast)


def check_all_ways(target, make_drafter, expected: list[list[int]], **options) -> None:
    """Every drafter, one row at a time and all together, says what was expected."""
    for way in DRAFTERS:
        decoder = Decoder(target, None if way == "plain" else make_drafter(way, target))
        together = decoder.generate(PROMPTS, max_new_tokens=MAX_NEW, **options)
        assert together.sequences == expected, way
        assert together.finished == [len(answer) < MAX_NEW for answer in expected]
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            assert decoder.generate(prompt, max_new_tokens=MAX_NEW, **options).sequences == [
                answer
            ], way


@pytest.mark.parametrize(
    "stops",
    [["cbcb"], ["dd", "bab"], *(more(s) for s in (["ccacd"], ["a"], ["abcdabcd"]))],
    ids=lambda stops: "+".join(stops),
)
def test_stop_strings_end_answers_as_in_transformers(target, make_drafter, stops) -> None:
    expected = [
        generated(target.model, p, MAX_NEW, stop_strings=stops, tokenizer=target.tokenizer)
        for p in PROMPTS
    ]
    shortened = expected != [generated(target.model, prompt, MAX_NEW) for prompt in PROMPTS]
    assert shortened == (stops != ["abcdabcd"])
    config = GenerationConfig(stop_strings=stops)
    check_all_ways(target, make_drafter, expected, generation_config=config)


def test_a_users_own_criteria(target, make_drafter) -> None:
    criteria = [EveryEleventh()]
    expected = [
        generated(target.model, p, MAX_NEW, stopping_criteria=StoppingCriteriaList(criteria))
        for p in PROMPTS
    ]
    assert any(sum(p + a) % 11 == 0 for p, a in zip(PROMPTS, expected, strict=True))
    check_all_ways(target, make_drafter, expected, stopping_criteria=criteria)


def test_a_sample_is_cut_where_the_stop_string_is_complete(target, make_drafter) -> None:
    decoder = Decoder(target, make_drafter("medusa:tree", target))
    sampled = {"max_new_tokens": MAX_NEW, "temperature": 1.0, "seed": 3}
    whole = decoder.generate(PROMPTS[0], **sampled).sequences[0]
    config = GenerationConfig(stop_strings="ca")
    result = decoder.generate(PROMPTS[0], **sampled, generation_config=config)
    (cut,), (text,) = result.sequences, result.texts
    assert len(cut) < len(whole) and cut == whole[: len(cut)]
    assert "ca" in text and "ca" not in target.tokenizer.decode(cut[:-1])
    pieces = decoder.stream(PROMPTS[0], **sampled, generation_config=config)
    assert "".join(pieces) == text


def test_stop_strings_that_no_token_can_say_are_refused(target) -> None:
    with pytest.raises(UserError, match="stop_strings"):
        Decoder(target).generate([9], generation_config=GenerationConfig(stop_strings=["é"]))


def test_a_token_costs_the_same_after_a_long_text_as_after_a_short_one(target) -> None:
    """Each token used to cost a tensor of prompt and answer together."""
    string, token = target.tokenizer.convert_tokens_to_ids, 9
    (stop,) = stops_for(["bab"], [], target.tokenizer, [[token] * 1000])
    assert len(stop.recent) < 10 and stop.text.length == 0
    assert [stop(t) for t in string(["dd", "ba", "bc"])] == [None, None, "stop_string"]
    (stop,) = stops_for(["bab"], [], target.tokenizer, [[1, *string(["ba"])]])
    assert stop(*string(["bc"])) == "stop_string", "the string may begin in the prompt"


def test_a_growing_text_keeps_what_it_gave() -> None:
    text = GrowingText([1, 2])
    given = []
    for token in range(3, 200):
        text.add(token)
        given.append(text.ids())
    assert [ids.tolist() for ids in given] == [[*range(1, last + 1)] for last in range(3, 200)]
    assert len({ids.data_ptr() for ids in given}) < 5, "it is copied when its room doubles"


def test_a_criterion_may_ask_to_be_called_seldom(target) -> None:
    class Counting(StoppingCriteria):
        every = 8

        def __init__(self) -> None:
            self.lengths: list[int] = []

        def __call__(self, input_ids, scores, **_) -> torch.Tensor:
            self.lengths.append(input_ids.shape[1])
            assert input_ids[0].tolist() == [*range(input_ids.shape[1])]
            return torch.tensor([input_ids.shape[1] == 24])

    criterion = Counting()
    (stop,) = stops_for([], [criterion], target.tokenizer, [[*range(5)]])
    reasons = [stop(token) for token in range(5, 24)]
    assert (criterion.lengths, reasons) == ([8, 16, 24], [None] * 18 + ["stopping_criteria"])
