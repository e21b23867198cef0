"""Options of one call that users of transformers and of servers expect, and why answers end."""

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from listening import Listener
from tiny import END, byte_tokenizer, random_prompts
from transformers import GenerationConfig, TextIteratorStreamer, TextStreamer
from transformers.generation.stopping_criteria import StoppingCriteria

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.infer import Decoder

PROMPTS = random_prompts(3)
WAYS = ["plain", "medusa:tree", "self"]


@pytest.fixture(scope="module", params=WAYS)
def decoder(request, target, make_drafter) -> Decoder:
    """Plain and drafted decoding of token ids."""
    way = request.param
    return Decoder(target, None if way == "plain" else make_drafter(way, target))


@pytest.fixture(scope="module")
def speaking(make_target) -> Decoder:
    """A decoder of bytes."""
    return Decoder(Target(make_target(vocab=260).model, byte_tokenizer()))


@pytest.mark.parametrize(
    "asked",
    [
        {"num_return_sequences": 3, "temperature": 1.0},
        {"generation_config": GenerationConfig(num_return_sequences=3, do_sample=True, top_k=64)},
    ],
)
def test_several_answers_to_each_prompt_have_a_seed_each(decoder, asked) -> None:
    result = decoder.generate(PROMPTS, max_new_tokens=9, seed=10, verifier="match", **asked)
    assert len(result.sequences) == 9
    assert result.prompt_lengths == [len(prompt) for prompt in PROMPTS for _ in range(3)]
    for number, answer in enumerate(result.sequences):
        alone = decoder.generate(
            PROMPTS[number // 3], max_new_tokens=9, seed=10 + number, temperature=1.0,
            verifier="match",
        )  # fmt: skip
        assert alone.sequences == [answer]
    with pytest.raises(UserError, match="9 answers need 9 seeds or one, got 3"):
        decoder.generate(PROMPTS, seed=[1, 2, 3], **asked)


def test_a_streamer_hears_what_it_hears_in_transformers(target, decoder) -> None:
    there, here = Listener(), Listener()
    target.model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=12, streamer=there)
    decoder.generate(PROMPTS[0], max_new_tokens=12, streamer=here)
    assert here.heard == there.heard and here.heard[-1] == "end"


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_transformers_own_streamers(speaking, capsys, skip_prompt) -> None:
    tokenizer = speaking.tokenizer
    ids = tokenizer("hello", return_tensors="pt")["input_ids"]
    expected = speaking.generate(ids, max_new_tokens=20).sequences[0]
    if not skip_prompt:
        expected = ids[0].tolist() + expected
    text = tokenizer.decode(expected)
    speaking.generate(ids, max_new_tokens=20, streamer=TextStreamer(tokenizer, skip_prompt))
    assert capsys.readouterr().out == text + "\n"
    streamer = TextIteratorStreamer(tokenizer, skip_prompt, timeout=60)
    options: dict[str, Any] = {"max_new_tokens": 20, "streamer": streamer}
    thread = threading.Thread(target=speaking.generate, args=(ids,), kwargs=options)
    thread.start()
    assert "".join(streamer) == text
    thread.join()


@pytest.mark.parametrize(
    "limit", [{"max_time": 100}, {"generation_config": GenerationConfig(max_time=100.0)}]
)
def test_answers_end_when_their_time_is_over(decoder, target, limit, monkeypatch) -> None:
    """A pass takes half a minute on this clock."""
    clock = SimpleNamespace(monotonic=itertools.count(step=30).__next__)
    monkeypatch.setattr("drafthead.infer.answers.emissions.time", clock)
    whole = Decoder(target).generate(PROMPTS, max_new_tokens=60)
    result = decoder.generate(PROMPTS, max_new_tokens=60, **limit)
    assert result.stats.steps == 3, "after the prompts and three steps there were 120 seconds"
    for answer, full, reason in zip(
        result.sequences, whole.sequences, result.finish_reasons, strict=True
    ):
        assert answer == full[: len(answer)]
        assert (reason == "time") == (answer != full)
    assert "time" in result.finish_reasons
    stream = decoder.steps(PROMPTS, max_new_tokens=60, **limit)
    assert len(list(stream)) == 4 and stream.result.sequences == result.sequences


class Sum(StoppingCriteria):
    """Stops when the sum of the last two tokens is a multiple of three."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -2:].sum(-1) % 3 == 0


@pytest.mark.parametrize(
    ("options", "reason", "finished"),
    [
        ({"max_new_tokens": 3}, "length", False),
        ({"generation_config": GenerationConfig(max_length=30)}, "length", False),
        ({"generation_config": GenerationConfig(eos_token_id=list(range(64)))}, "end_token", True),
        ({"stopping_criteria": [Sum()]}, "stopping_criteria", True),
        ({"max_time": 1e-9}, "time", False),
    ],
)  # fmt: skip
def test_each_answer_says_why_it_ended(make_target, options, reason, finished) -> None:
    target = make_target()
    target.model.generation_config.eos_token_id = None
    target.config.eos_token_id = None
    result = Decoder(target).generate([PROMPTS[0]], **options)
    assert result.finish_reasons == [reason] and result.finished == [finished]


def test_an_end_token_at_the_limit_is_an_end(decoder) -> None:
    config = GenerationConfig(forced_eos_token_id=END)
    result = decoder.generate(PROMPTS, max_new_tokens=6, generation_config=config)
    assert result.finish_reasons == ["end_token"] * 3


def test_a_stop_string_may_lie_across_tokens(speaking) -> None:
    sampled = {"max_new_tokens": 60, "temperature": 1.0, "seed": 2}
    whole = speaking.generate("hello", **sampled)
    text = whole.texts[0]
    # Of whole characters: bytes that are none cannot be asked for.
    place = next(end for end in range(3, len(text)) if "\ufffd" not in text[end - 3 : end])
    stop = text[place - 3 : place]
    for stops in (stop, [stop, "never written"]):
        cut = speaking.generate("hello", **sampled, stop_strings=stops)
        assert cut.texts[0] == text[:place] and cut.finish_reasons == ["stop_string"]
        assert "".join(speaking.stream("hello", **sampled, stop_strings=stops)) == cut.texts[0]


def test_a_closed_stream_keeps_what_it_has(speaking) -> None:
    whole = speaking.generate("hello", max_new_tokens=40)
    stream = speaking.stream("hello", max_new_tokens=40)
    shown = next(stream) + next(stream)
    assert stream.result.finish_reasons == [None] and stream.result.finished == [False]
    stream.close()
    assert list(stream) == []
    result = stream.result
    assert result.finish_reasons == ["cancelled"] and whole.texts[0].startswith(shown)
    assert result.sequences[0] == whole.sequences[0][: len(result.sequences[0])]
    assert result.prompt_lengths == whole.prompt_lengths


def test_a_stream_that_has_ended_has_the_result_of_generate(decoder) -> None:
    stream = decoder.steps(PROMPTS, max_new_tokens=12)
    list(stream)
    stream.close()
    whole = decoder.generate(PROMPTS, max_new_tokens=12)
    assert stream.result.sequences == whole.sequences
    assert stream.result.finish_reasons == whole.finish_reasons


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num_return_sequences": 2}, "num_return_sequences=2 without sampling"),
        ({"num_return_sequences": 0}, "num_return_sequences must be at least 1, got 0"),
        ({"max_time": 0}, "max_time must be a number of seconds above 0, got 0"),
        ({"max_time": "1"}, "max_time must be a number of seconds above 0, got '1'"),
        ({"logprobs": -1}, "logprobs must be at least 0, got -1"),
        ({"logprobs": True}, "logprobs must be an integer, got True"),
        ({"temperature": "0.5"}, "temperature must be a number, got '0.5'"),
        ({"temperature": 1, "top_p": "1"}, "top_p must be a number, got '1'"),
        ({"temperature": 1, "top_k": 1.5}, "top_k must be an integer, got 1.5"),
        ({"stop_strings": [""]}, r"stop_strings must be texts that are not empty, got \[''\]"),
        ({"stop_strings": [3]}, r"stop_strings must be texts that are not empty, got \[3\]"),
        ({"stop_strings": 3}, "stop_strings must be texts that are not empty, got 3"),
        ({"generation_config": {"top_k": 3}}, "must be a GenerationConfig .*, got {'top_k': 3}"),
        ({"streamer": Listener()}, "a streamer takes one answer, got 2"),
        (
            {"generation_config": GenerationConfig(return_dict_in_generate=True)},
            "return_dict_in_generate=True, .* always returns a result",
        ),
        (
            {"generation_config": GenerationConfig(output_scores=True)},
            "output_scores=True, .*: ask for logprobs",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(target, options, complaint) -> None:
    with pytest.raises(UserError, match=complaint):
        Decoder(target).generate([[9], [8]], **options)


@pytest.mark.parametrize("way", ["stream", "steps"])
def test_a_streamer_is_for_generate_alone(speaking, way) -> None:
    with pytest.raises(UserError, match="streamer is an option of generate"):
        getattr(speaking, way)("hello", streamer=Listener())
