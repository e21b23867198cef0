"""What a form demands is drafted, and answers stay those of plain decoding in the same form."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from laws import p_value
from tiny import byte_tokenizer, tiny_llama
from transformers import LogitsProcessor

from drafthead.core.drafting.form import AnswerForm, Forced
from drafthead.core.sampling import SamplingConfig, probabilities
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.target import Target
from drafthead.infer import Decoder, ServeRequest
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.request.options import read_options
from drafthead.serve.json_grammar import Form, JsonGrammars, schema_grammar, text_grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "temperature": {"type": "integer", "maximum": 99},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "temperatures": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["temperature", "unit", "temperatures"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "parameters": SCHEMA}
FORMS = {
    "schema": Form("it", schema_grammar(SCHEMA, "it"), thinks=False),
    "regex": Form("it", text_grammar("regex", "(abcdef|abcxyz){3}", "it"), thinks=False),
    "choice": Form("it", text_grammar("choice", ["north by west", "north"], "it"), thinks=False),
    "grammar": Form(
        "it", text_grammar("grammar", 'start: ("ab" /[0-9]/ "cd")~3', "it"), thinks=False
    ),
    "tools": Form("it", None, [WEATHER], several=False, thinks=False),
}
DRAFTERS = [None, "prompt-lookup", "medusa:tree+lookup", "draft-model+lookup", "medusa:tree"]
PROMPT = [20, 21, 22, 20, 21]
WAYS = [{}, {"temperature": 1.0, "verifier": "match", "seed": 3}]


@pytest.fixture(scope="module")
def target() -> Target:
    tokenizer = byte_tokenizer()
    model = tiny_llama(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    return Target(model, tokenizer)


@pytest.fixture(scope="module")
def grammars(target) -> JsonGrammars:
    return JsonGrammars(Decoder(target))


def answer(decoder: Decoder, mask: LogitsProcessor, drafts: bool = True, **options):
    settings = read_options({"max_new_tokens": 48, "logits_processor": [mask], **options})
    request = decoder.request(PROMPT, settings)
    run = BatchRun(replace(request, drafts=None if drafts else frozenset()), torch.device("cpu"))
    for _ in decoder.method(run).decoding(run):
        pass
    return run.rows[0].tokens, run.stats


@pytest.mark.parametrize("way", WAYS, ids=["greedy", "match"])
@pytest.mark.parametrize("name", FORMS)
def test_answers_are_those_of_plain_decoding_in_the_form(
    target, grammars, make_drafter, name: str, way: dict
) -> None:
    expected, plain = answer(Decoder(target), grammars.mask(FORMS[name], 5, 0), False, **way)
    assert plain.tau == 1.0
    for drafter in DRAFTERS:
        looks = drafter is None or "lookup" in drafter
        made = drafter and make_drafter(drafter, target)
        decoder = Decoder(target, made, adaptive=not looks)  # which then gets lookup for the form
        found, stats = answer(decoder, grammars.mask(FORMS[name], 5, 0), **way)
        assert found == expected, drafter
        assert stats.tau > 1.3, "what is forced was drafted"


@pytest.mark.parametrize("name", FORMS)
def test_what_is_sure_is_the_only_token_allowed(target, grammars, name: str) -> None:
    tokens, _ = answer(Decoder(target), grammars.mask(FORMS[name], 5, 0), False)
    mask, sure = grammars.mask(FORMS[name], 5, 0), 0
    for length in range(len(tokens)):
        text = tokens[:length]
        for place, token in enumerate(mask.forced(text).sure, start=length):
            assert mask.allowed(text).nonzero().tolist() == [[token]]
            text = [*text, token]
            assert tokens[place : place + 1] in ([token], []), "or the answer ends at its limit"
            sure += 1
    ended = tokens[-1] in mask.ends
    assert sure and (not ended or mask.forced(tokens) == Forced([], [])), "nothing follows the end"


class AfterEven(LogitsProcessor, AnswerForm):
    """A form in which the token after an even one is that plus one; it says so of each second."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        kept = torch.arange(scores.shape[1]) == input_ids[:, -1:] + 1
        is_free = (input_ids.shape[1] == 3) | (input_ids[:, -1:] % 2 == 1)
        return scores.masked_fill(~(kept | is_free), -torch.inf)

    def forced(self, answer: Sequence[int]) -> Forced:
        if answer and answer[-1] == 0:
            return Forced([1], [[2, 3], [3]])
        return Forced([], [[answer[-1] + 1]] if answer and answer[-1] == 2 else [])

    def legal(self, answer: Sequence[int], tokens: Sequence[int]) -> int:
        texts = [*answer[-1:], *tokens]
        wrong = [a % 2 == 0 and b != a + 1 for a, b in pairwise(texts)]
        return [*wrong, True].index(True)


def law_in_form(target: Target, prompt: list[int]) -> torch.Tensor:
    """Exact probabilities [4, 4, 4] of three tokens under `AfterEven`."""
    law = torch.ones(4, 4, 4, dtype=torch.float64)
    for text in torch.cartesian_prod(*[torch.arange(4)] * 3).tolist():
        for place, token in enumerate(text):
            ids = torch.tensor([prompt + text[:place]])
            positions = torch.arange(ids.shape[1])[None]
            scores = target.run(ids, positions, None, FeatureSpec(last=False)).logits[:, -1]
            probs = probabilities(AfterEven()(ids, scores), SamplingConfig(temperature=0.9))
            law[tuple(text)] *= probs[0, token].double()
    return law


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        (None, "match"),
        (None, "rejection"),
        ("prompt-lookup", "traversal"),
        ("medusa:tree+lookup", "match"),
    ],
)
def test_samples_follow_the_law_in_the_form(make_target, make_drafter, drafter, rule) -> None:
    """Chi-square over the continuations of a 4-token target; false alarm 1e-5 a case."""
    target = make_target(seed=3, vocab=4)
    decoder = Decoder(target, drafter and make_drafter(drafter, target))
    options = {"temperature": 0.9, "max_new_tokens": 3, "logits_processor": [AfterEven()]}
    result = decoder.generate([[1, 2, 3]] * 1500, verifier=rule, **options)
    assert p_value(result.sequences, law_in_form(target, [1, 2, 3])) > 1e-5


def test_rows_with_and_without_a_form_share_a_batch(target, grammars, make_drafter) -> None:
    """Each is answered as alone; the mask of one prompt's length keeps that row alone in form."""
    decoder = Decoder(target, make_drafter("prompt-lookup", target))

    def request(form: Form | None, seed: int):
        masks = [] if form is None else [grammars.mask(form, 5, 0)]
        return {"prompt": [*PROMPT[:4], seed], "options": {"logits_processor": masks}}

    kinds = [None, FORMS["schema"], FORMS["tools"], None, FORMS["regex"]]
    asked = [ServeRequest(**request(form, 30 + n)) for n, form in enumerate(kinds)]
    together = {each.id: each for each in decoder.serve(asked, max_new_tokens=40)}
    for number, form in enumerate(kinds):
        [alone] = decoder.serve([ServeRequest(**request(form, 30 + number))], max_new_tokens=40)
        assert together[number].tokens == alone.tokens and not together[number].error


def test_a_prompt_that_was_read_plainly_is_not_read_again(target, grammars) -> None:
    decoder = Decoder(target)
    expected, _ = answer(decoder, grammars.mask(FORMS["schema"], 5, 0), False)
    decoder.remember(PROMPT[:4])
    found, stats = answer(decoder, grammars.mask(FORMS["schema"], 5, 0))
    assert (found, stats.reused) == (expected, 3)
    assert stats.tau > 1.3


@pytest.mark.parametrize("drafter", ["eagle3:own", "medusa:tree", "draft-model"])
def test_what_another_drafter_has_read_is_not_gone_on_with(
    target, grammars, make_drafter, drafter: str
) -> None:
    """A head's session of a remembered prompt is not that of the head with lookup."""
    expected, _ = answer(Decoder(target), grammars.mask(FORMS["schema"], 5, 0), False)
    decoder = Decoder(target, make_drafter(drafter, target), adaptive=True)
    decoder.remember(PROMPT)
    assert answer(decoder, grammars.mask(FORMS["schema"], 5, 0))[0] == expected
    plain = decoder.generate(PROMPT, max_new_tokens=8)
    assert (
        plain.stats.reused
        and plain.sequences == Decoder(target).generate(PROMPT, max_new_tokens=8).sequences
    )
