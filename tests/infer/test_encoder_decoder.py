"""Decoding with encoder-decoder targets: drafters, rules, batches, and what is refused."""

import copy

import pytest
import torch
from hidden_answers import generated
from laws import law_of_three_tokens, p_value
from tiny import byte_tokenizer, letters_tokenizer, random_prompts, tiny_encoder_decoder
from transformers import GenerationConfig

from drafthead.core.drafting.drafter import Committed, Drafter
from drafthead.core.errors import UserError
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.any_target import target_of
from drafthead.core.target.features import Features
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget
from drafthead.infer import Decoder
from drafthead.infer.drafters.draft_model import DraftModel
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.drafters.model_drafter import model_drafter
from drafthead.infer.drafters.with_lookup import WithLookup
from drafthead.infer.verifiers import VERIFIERS
from drafthead.lab.exactness.exactness import SampledPair, later_tokens
from drafthead.lab.exactness.goodness_of_fit import chance_of_worse

MAX_NEW = 24
CLASSES = ("t5", "bart")
ENDS = {"t5": 23, "bart": 30}  # tokens with which some of their answers end


def noisy(target: Target) -> Target:
    """A draft model: the same with a little noise, so that its first guess is often wrong."""
    model = copy.deepcopy(target.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.1 * parameter.std(correction=0) * noise
    return target_of(model)


def ending_target(name: str) -> Target:
    """A target whose answers may end by themselves."""
    return target_of(tiny_encoder_decoder(name, eos_token_id=ENDS[name]))


@pytest.fixture(scope="module", params=CLASSES)
def target(request) -> Target:
    return ending_target(request.param)


@pytest.fixture(scope="module")
def greedy_answers(target) -> list[list[int]]:
    answers = [generated(target.model, source, MAX_NEW) for source in random_prompts(12)]
    lengths = [*map(len, answers)]
    assert min(lengths) < max(lengths) == MAX_NEW, "some answers end by themselves, others do not"
    return answers


def drafter_named(name: str, target: Target) -> Drafter:
    if name == "lookup":
        return PromptLookup(depth=3)
    drafter = DraftModel(noisy(target), target, depth=3)
    return WithLookup(drafter, None) if name == "draft model + lookup" else drafter


@pytest.mark.parametrize("name", ["draft model", "lookup", "draft model + lookup"])
def test_greedy_answers_equal_those_of_transformers(target, greedy_answers, name) -> None:
    drafter, accepted = drafter_named(name, target), 0
    for budget in {drafter.budgets[0], drafter.budgets[-1]}:  # a tree and a chain
        decoder = Decoder(target, drafter, budget)
        for rows in (slice(0, 1), slice(1, 5), slice(5, 12)):
            result = decoder.generate(random_prompts(12)[rows], max_new_tokens=MAX_NEW)
            assert result.sequences == greedy_answers[rows]
            accepted += sum(n - 1 for row in result.stats.accept_lengths for n in row)
    assert accepted > 0, "a drafter of which nothing is accepted tests nothing"


def test_requests_that_come_and_go_get_the_same_answers(target, greedy_answers) -> None:
    decoder = Decoder(target, drafter_named("draft model + lookup", target))
    answers = list(decoder.serve(random_prompts(12), max_rows=3, max_new_tokens=MAX_NEW))
    assert {answer.id: answer.tokens for answer in answers} == dict(enumerate(greedy_answers))


LAWFUL = sorted(rule.name for rule in VERIFIERS.values() if rule.lossless and not rule.greedy)


@pytest.mark.parametrize(
    ("name", "verifier"), [*(("t5", rule) for rule in LAWFUL), ("bart", "traversal")]
)
def test_sampled_answers_follow_the_targets_law(name, verifier) -> None:
    """Chi-square over the continuations of a target of 4 tokens; false alarm 1e-5 a case."""
    target = target_of(tiny_encoder_decoder(name, seed=3, vocab_size=4))
    with torch.no_grad():
        target.model.lm_head.weight *= 0.2  # so that there is a choice
    decoder = Decoder(target, DraftModel(noisy(target), target, depth=3), Budget(4, 3))
    source, count, sampling = [1, 2, 3], 2000, SamplingConfig(temperature=1.0, top_p=0.9)
    result = decoder.generate(
        [source] * count, max_new_tokens=3, temperature=1.0, top_p=0.9, verifier=verifier
    )
    assert result.stats.tau > 1.3, "drafts are accepted"
    law = law_of_three_tokens(target, source, sampling)
    assert (law > 0.01).sum() > 8, "a law without a choice tests little"
    assert p_value(result.sequences, law) > 1e-5


@pytest.mark.parametrize("verifier", ["typical", "lenient"])
def test_lossy_rules_accept_more(target, verifier) -> None:
    decoder = Decoder(target, DraftModel(noisy(target), target, depth=3), Budget(4, 3))
    options = {"max_new_tokens": MAX_NEW, "temperature": 1.0}
    lossy = decoder.generate(random_prompts(8), verifier=verifier, **options)
    exact = decoder.generate(random_prompts(8), verifier="rejection", **options)
    assert lossy.stats.tau > exact.stats.tau


def test_lookup_finds_what_the_source_says() -> None:
    target = ending_target("bart")
    source = [10, 11, 12, 13, 14]
    prompt = target.as_prompt(source)
    session = PromptLookup(depth=3).start(torch.tensor([prompt]), torch.tensor([len(prompt)]))
    following = torch.tensor([[*prompt[1:], 11]])  # the answer begins with the source's 11
    session.commit(Committed(following, Features(last=None), torch.tensor([len(prompt)])))
    tree = session.propose(Budget(4, 3), SamplingConfig(), None)
    assert tree.tokens.tolist() == [[11, 12, 13, 14]]


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"max_length": 9}],
    ids=str,
)
def test_processors_and_lengths_count_the_answer_and_not_the_source(target, options) -> None:
    decoder = Decoder(target, PromptLookup(depth=3))
    for source in random_prompts(3):
        config = GenerationConfig(**options)
        new = None if "max_length" in options else 12
        answer = decoder.generate(source, max_new_tokens=new, generation_config=config)
        start = len(target.decoder_prompt)
        length = 9 - start if new is None else new
        options = {key: value for key, value in options.items() if key != "max_length"}
        assert answer.sequences[0] == generated(target.model, source, length, **options)


def test_the_law_of_later_tokens_is_measured(target) -> None:
    decoder = Decoder(target, DraftModel(noisy(target), target, depth=3), Budget(4, 3))
    pair = SampledPair(decoder, target, SamplingConfig(1.0), "rejection", repetition_penalty=1.2)
    found = later_tokens(pair, random_prompts(4), answers=16, max_new_tokens=16, seed=0)
    assert found.accepted > 0.1
    assert chance_of_worse([found.fit]) > 1e-5


def test_folders_answer_texts(tmp_path) -> None:
    """A source is a text with the end that its tokenizer puts there; answers can be streamed."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "decoder_start_token_id": 0}
    for folder, seed in (("target", 0), ("draft", 1)):
        model = tiny_encoder_decoder("t5", seed, **ids, eos_token_id=tokenizer.eos_token_id)
        model.save_pretrained(tmp_path / folder)
        tokenizer.save_pretrained(tmp_path / folder)
    decoder = Decoder.from_pretrained(tmp_path / "target", draft=[tmp_path / "draft", "lookup"])
    text, options = "a source", {"max_new_tokens": 20, "stop_strings": ["not written"]}
    result = decoder.generate(text, **options)
    expected = generated(decoder.target.model, tokenizer(text)["input_ids"], 20)
    assert result.sequences[0] == expected
    assert "".join(decoder.stream(text, **options)) == result.texts[0]


# ---- what is refused ----------------------------------------------------------------------------


def test_what_needs_a_decoder_alone_is_refused(tmp_path) -> None:
    target = ending_target("t5")
    decoder = Decoder(target)
    calls = {
        "a draft head": lambda: Decoder.from_pretrained(target, draft=f"head:{tmp_path}"),
        "compile": lambda: Decoder.from_pretrained(target, compile=True),
        "chat": decoder.chat,
        "remember": lambda: decoder.remember([9, 10]),
        "custom_generate": decoder.as_custom_generate,
    }
    for what, call in calls.items():
        with pytest.raises(UserError, match=f"{what} is not available for T5For.*encoder-decoder"):
            call()


def test_draft_models_begin_as_the_target_does(make_target) -> None:
    t5, bart = (target_of(tiny_encoder_decoder(name)) for name in CLASSES)
    alone = make_target()
    for draft, whole in ((bart, t5), (alone, t5), (t5, alone)):
        with pytest.raises(UserError, match="must begin its answers as the target does"):
            model_drafter(draft, whole, 3)
    letters = "".join(map(chr, range(0x4E00, 0x4E00 + 64)))
    for each, order in ((t5, 1), (bart, -1)):
        each.tokenizer = letters_tokenizer(letters[::order])
    with pytest.raises(UserError, match="another tokenizer is not available"):
        model_drafter(bart, t5, 3)


def test_a_call_cannot_let_the_decoder_begin_otherwise() -> None:
    decoder = Decoder(ending_target("bart"))
    with pytest.raises(UserError, match="forced_bos_token_id=5, but the model's own is 3"):
        decoder.generate([9], generation_config=GenerationConfig(forced_bos_token_id=5))
    with pytest.raises(UserError, match="decoder_start_token_id=1, but the model's own is 2"):
        decoder.generate([9], generation_config=GenerationConfig(decoder_start_token_id=1))


def test_beams_are_those_of_generate(target: Target) -> None:
    sources, most, forced = random_prompts(3), 12, len(target.decoder_prompt) - 1
    decoder = Decoder(target, DraftModel(noisy(target), target, depth=3))
    found = decoder.generate(
        sources, max_new_tokens=most, num_beams=3, num_return_sequences=2, length_penalty=2.0
    )
    assert found.stats.tau > 1
    for number, source in enumerate(sources):
        expected = target.model.generate(
            torch.tensor([source]),
            max_new_tokens=most + forced,  # which counts the tokens that answers must begin with
            num_beams=3,
            num_return_sequences=2,
            length_penalty=2.0,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        answers = found.sequences[2 * number : 2 * number + 2]
        begun = [*target.decoder_prompt]
        for answer, tokens in zip(answers, expected.sequences.tolist(), strict=True):
            assert tokens[: len(begun) + len(answer)] == begun + answer
        scores = torch.tensor(found.scores[2 * number : 2 * number + 2])
        torch.testing.assert_close(scores, expected.sequences_scores)
