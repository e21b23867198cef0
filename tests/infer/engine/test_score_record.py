"""The log-probabilities of an answer are those that transformers gives to the same tokens."""

from typing import Any

import pytest
import torch
from tiny import END, random_prompts
from transformers import GenerationConfig, LogitsProcessorList

from drafthead.infer import Decoder, Logprobs

PROMPTS = random_prompts(3)
WAYS = ["plain", "medusa:tree", "draft-model", "self"]
SAMPLED = {"temperature": 0.7, "top_p": 0.9, "seed": 3}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy with a penalty": {
        "generation_config": GenerationConfig(repetition_penalty=1.3, eos_token_id=[END, 40])
    },
    "auto": SAMPLED,
    "match": {**SAMPLED, "verifier": "match"},
    "traversal": {**SAMPLED, "verifier": "traversal"},
    "typical": {**SAMPLED, "verifier": "typical"},
    "sampled with a penalty": {
        "generation_config": GenerationConfig(
            repetition_penalty=1.3, do_sample=True, top_k=9, temperature=1.5
        )
    },
}


def of_transformers(target, prompt: list[int], answer: list[int], options) -> Logprobs:
    """One pass over the whole text, and transformers' processors after each part of it."""
    config = options.get("generation_config") or GenerationConfig(
        do_sample="temperature" in options, temperature=options.get("temperature"),
        top_p=options.get("top_p"),
    )  # fmt: skip
    processors = target.model._get_logits_processor(
        config, len(prompt), logits_processor=LogitsProcessorList(), model_kwargs={}
    )
    text = torch.tensor([prompt + answer])
    logits = target.model(text).logits[0, len(prompt) - 1 : -1].float()
    scores = torch.cat(
        [
            processors(text[:, : len(prompt) + place], row[None].clone())
            for place, row in enumerate(logits)
        ]
    )
    chosen = torch.tensor(answer)[:, None]
    raw = logits.log_softmax(-1)
    best = raw.topk(2)
    return Logprobs(
        scores.log_softmax(-1).gather(1, chosen)[:, 0].tolist(),
        raw.gather(1, chosen)[:, 0].tolist(),
        [
            list(zip(*pair, strict=True))
            for pair in zip(best[1].tolist(), best[0].tolist(), strict=True)
        ],
    )


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("way", WAYS)
def test_logprobs_are_those_of_transformers(target, make_drafter, way, name) -> None:
    options = REQUESTS[name]
    decoder = Decoder(target, None if way == "plain" else make_drafter(way, target))
    result = decoder.generate(PROMPTS, max_new_tokens=14, **options, logprobs=2)
    assert result.sequences == decoder.generate(PROMPTS, max_new_tokens=14, **options).sequences
    assert result.logprobs is not None
    for prompt, answer, found in zip(PROMPTS, result.sequences, result.logprobs, strict=True):
        expected = of_transformers(target, prompt, answer, options)
        assert found.processed == pytest.approx(expected.processed, abs=1e-4)
        assert found.raw == pytest.approx(expected.raw, abs=1e-4)
        for here, there in zip(found.top, expected.top, strict=True):
            assert [token for token, _ in here] == [token for token, _ in there]
            assert [p for _, p in here] == pytest.approx([p for _, p in there], abs=1e-4)


def test_nothing_is_recorded_that_was_not_asked_for(target) -> None:
    decoder = Decoder(target)
    assert decoder.generate(PROMPTS, max_new_tokens=3).logprobs is None
    (record,) = decoder.generate(PROMPTS[0], max_new_tokens=3, logprobs=0).logprobs
    assert record.top == [[], [], []] and len(record.raw) == 3


def test_a_stream_gives_the_record_so_far(target, make_drafter) -> None:
    decoder = Decoder(target, make_drafter("self", target))
    whole = decoder.generate(PROMPTS, max_new_tokens=20, logprobs=1)
    stream = decoder.steps(PROMPTS, max_new_tokens=20, logprobs=1)
    for _ in range(3):
        next(stream)
    for answer, record in zip(stream.result.sequences, stream.result.logprobs, strict=True):
        assert len(answer) == len(record.raw)
    list(stream)
    assert stream.result.logprobs == whole.logprobs
