"""Logits processors: behind every node of a tree they do what they do in `model.generate`."""

import pytest
import torch
from laws import p_value
from tiny import BUSHY, END, VOCAB, random_prompts
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as hf

from drafthead.core.errors import UserError
from drafthead.core.sampling import SamplingConfig, probabilities
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import PADDING, TokenTree
from drafthead.infer import Decoder
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.engine.path_processing import PathProcessing
from drafthead.infer.request.options import read_options
from drafthead.infer.request.processors import AnswerPenalty, processors_for
from drafthead.infer.request.request import Request
from drafthead.infer.scheduling.request_of import limit_of

MAX_NEW = 20
PROMPTS = random_prompts(3)  # of different lengths
DRAFTERS = ["plain", "medusa:tree", "medusa:chain", "draft-model", "self", "prompt-lookup"]


class Echo(hf.LogitsProcessor):
    """A user's own: shifts every score by a pattern that depends on the last two tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens = torch.arange(scores.shape[-1])
        pair = input_ids[:, -2:].sum(-1, keepdim=True)
        return scores + 3 * torch.sin(1.0 + tokens * pair)


class Alternate(hf.LogitsProcessor):
    """A user's grammar: even and odd tokens alternate, and it cannot read any other text."""

    def __init__(self, prompt_length: int):
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        answer = input_ids[:, self.prompt_length - 1 :]
        assert ((answer[:, 1:] - answer[:, :-1]) % 2 == 1).all(), "no such text"
        same = (torch.arange(scores.shape[-1]) - answer[:, -1:]) % 2 == 0
        return scores.masked_fill(same, -torch.inf)


SETTINGS = {
    "repetition penalty": {"repetition_penalty": 1.3},
    "no repeated bigrams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[n] for n in range(20, 40)] + [[45, 50], [50, 45]]},
    "least length": {"min_new_tokens": 18, "repetition_penalty": 1.1},
    "least length with the prompt": {"min_length": 25, "repetition_penalty": 1.1},
    "two least lengths": {"min_new_tokens": 2, "min_length": 60, "repetition_penalty": 1.1},
    "a first and a last token": {"forced_bos_token_id": 9, "forced_eos_token_id": 9},
    "sequence bias": {"sequence_bias": [[[n], 4.0] for n in range(30)] + [[[45, 50], -9.0]]},
    "suppressed tokens": {"suppress_tokens": list(range(0, VOCAB, 3))},
    "suppressed first tokens": {"begin_suppress_tokens": list(range(8, VOCAB, 2))},
    "growing wish to end": {"exponential_decay_length_penalty": (2, 1.5)},
    "normalised": {
        "renormalize_logits": True, "remove_invalid_values": True, "suppress_tokens": [14, 30, 6],
    },
    "all at once": {
        "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 5,
        "suppress_tokens": [11, 12, 13], "forced_eos_token_id": 3,
    },
}  # fmt: skip


def answer_of_transformers(target, prompt: list[int], processors=(), **options) -> list[int]:
    """What `model.generate` says to one prompt, greedily."""
    ids = torch.tensor([prompt])
    config = GenerationConfig(do_sample=False, max_new_tokens=MAX_NEW, **options)
    output = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        logits_processor=LogitsProcessorList(processors),
    )
    return output[0, len(prompt) :].tolist()


def answers_of_ours(target, drafter, **options) -> list[list[int]]:
    """Our greedy answers to the prompts; a batch of one and a batch of all must agree."""
    decoder = Decoder(target, drafter)
    together = decoder.generate(PROMPTS, **options).sequences
    alone = [decoder.generate(prompt, **options).sequences[0] for prompt in PROMPTS]
    assert together == alone
    return together


@pytest.fixture(scope="module")
def drafters(target, make_drafter):
    """Every way of decoding, by name."""
    return {n: None if n == "plain" else make_drafter(n, target) for n in DRAFTERS}


@pytest.fixture(scope="module")
def unprocessed(target) -> list[list[int]]:
    return [answer_of_transformers(target, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_answers_equal_those_of_transformers(target, drafters, unprocessed, name) -> None:
    options = SETTINGS[name]
    expected = [answer_of_transformers(target, prompt, **options) for prompt in PROMPTS]
    assert expected != unprocessed, "a setting that changes nothing tests nothing"
    config = GenerationConfig(max_new_tokens=MAX_NEW, **options)
    for way, drafter in drafters.items():
        assert answers_of_ours(target, drafter, generation_config=config) == expected, way


def test_a_token_said_twice_is_penalised_twice_for_frequency_and_once_for_presence() -> None:
    ids = torch.tensor([[3, 3, 1, 2, 1]])  # the prompt is 3 3
    penalised = AnswerPenalty(2, frequency=0.5, presence=1.0)(ids, torch.zeros(1, 4))
    assert penalised.tolist() == [[0, -2.0, -1.5, 0]]


CUSTOM = {
    "own": [Echo()],
    "own and known": [Echo(), hf.NoRepeatNGramLogitsProcessor(2)],
    "watermark": [hf.WatermarkLogitsProcessor(VOCAB, "cpu")],
}


@pytest.mark.parametrize("custom", CUSTOM.values(), ids=CUSTOM)
def test_a_users_own_processors(target, drafters, unprocessed, custom) -> None:
    options = {"repetition_penalty": 1.1}
    expected = [answer_of_transformers(target, p, custom, **options) for p in PROMPTS]
    assert expected != unprocessed
    config = GenerationConfig(max_new_tokens=MAX_NEW, **options)
    for way, drafter in drafters.items():
        ours = answers_of_ours(target, drafter, generation_config=config, logits_processor=custom)
        assert ours == expected, way


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("way", DRAFTERS)
def test_no_processor_is_shown_a_text_that_it_forbids(target, drafters, way, temperature) -> None:
    decoder, prompt = Decoder(target, drafters[way]), PROMPTS[0]
    decoder.end_ids = frozenset()
    result = decoder.generate(
        prompt,
        max_new_tokens=MAX_NEW,
        temperature=temperature,
        logits_processor=[Alternate(len(prompt))],
    )
    answer = torch.tensor([prompt[-1], *result.sequences[0]])
    assert len(answer) == MAX_NEW + 1 and ((answer[1:] - answer[:-1]) % 2 == 1).all()


NODE_SETTINGS = SETTINGS | {"counts": {"frequency_penalty": 0.5, "presence_penalty": -0.3}}


def a_batch_in_full_flight(target: Target, limit: int, config: GenerationConfig) -> BatchRun:
    """Three rows with answers of different lengths; the third has ended."""
    prompts, limits, ends = [[9, 10, 9], [11], [12, 13]], [limit] * 3, frozenset([END])
    processors = processors_for(target, config, [], prompts, limits, ends)
    request = Request(
        prompts=prompts, limits=limits, seeds=[0] * 3, end_ids=ends, processors=processors
    )
    batch = BatchRun(request, target.device)
    batch.take([[9, 10, 11, 9], [11, 11], [END]])
    return batch


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("name", NODE_SETTINGS)
def test_a_nodes_scores_are_those_of_its_path_alone(target, name, greedy) -> None:
    config = GenerationConfig(**NODE_SETTINGS[name])
    batch = a_batch_in_full_flight(target, 7, config)
    prompts, processors = batch.request.prompts, batch.request.processors
    generator = torch.Generator().manual_seed(2)
    tokens = torch.stack([torch.randperm(14, generator=generator)[:10] for _ in prompts])
    tokens[:, 0] = torch.tensor([9, 11, END])
    tokens[0, 5] = PADDING
    tree = TokenTree.from_shape(BUSHY, tokens)
    logits = torch.randn(3, tree.num_nodes, VOCAB, generator=generator)
    for node in range(1, 10):  # so that paths of the tree come true when greedy, too
        if node != 5:
            logits[:2, tree.parents[0, node], tokens[:2, node]] += 4
    processing = PathProcessing(batch.rows, frozenset([END]), greedy)
    processed = processing.after_nodes(tree, logits)

    compared = 0
    for place in range(2):
        reached = {0}
        for node in range(tree.num_nodes):
            path = tokens[place, tree.ancestors[place, node]][1:].tolist()
            parent = int(tree.parents[place, node])
            if node and parent in reached and len(batch.rows[place].tokens) + len(path) < 7:
                before, token = processed[place, parent], int(tokens[place, node])
                likely = token == before.argmax() if greedy else before[token] > -torch.inf
                if likely and token not in (END, PADDING):
                    reached.add(node)
            if node in reached:
                ids = torch.tensor([prompts[place] + batch.rows[place].tokens + path])
                alone = processors[place](ids, logits[place, node][None])[0]
                assert processed[place, node].equal(alone), (place, node)
                compared += 1
            else:
                assert processed[place, node].equal(logits[place, node])
    assert compared > 2, "the roots alone are no test of trees"
    assert processed[2].equal(logits[2]), "the third row has ended"


def processed_law_of_three_tokens(target, prompt: list[int], options: dict) -> torch.Tensor:
    """Exact probabilities [4, 4, 4] of three tokens, every continuation processed on its own."""
    law = torch.zeros(4, 4, 4, dtype=torch.float64)
    sampling = SamplingConfig(temperature=0.9, min_p=options.get("min_p", 0.0))

    def probs_behind(answer: list[int]) -> torch.Tensor:
        ids = torch.tensor([prompt + answer])
        positions = torch.arange(ids.shape[1])[None]
        logits = target.run(ids, positions, None, FeatureSpec(last=False)).logits[0, -1]
        for token in set(ids[0].tolist()):
            factor = options["repetition_penalty"]
            logits[token] = logits[token] * factor if logits[token] < 0 else logits[token] / factor
        for token in set(answer):
            logits[token] -= options["frequency_penalty"] * answer.count(token)
        return probabilities(logits, sampling).double()

    for a in range(4):
        for b in range(4):
            law[a, b] = probs_behind([])[a] * probs_behind([a])[b] * probs_behind([a, b])
    return law


@pytest.mark.parametrize("way", ["plain", "medusa:tree", "draft-model", "prompt-lookup"])
def test_samples_follow_the_processed_law(make_target, make_drafter, way) -> None:
    """Chi-square over the 64 continuations of a 4-token target; false alarm 1e-5 a case."""
    target = make_target(seed=3, vocab=4)
    drafter = None if way == "plain" else make_drafter(way, target)
    prompt, count = [1, 2, 3], 6000
    options = {"repetition_penalty": 1.6, "frequency_penalty": 0.8, "min_p": 0.05}
    config = GenerationConfig(do_sample=True, temperature=0.9, max_new_tokens=3, **options)
    result = Decoder(target, drafter).generate([prompt] * count, generation_config=config)
    law = processed_law_of_three_tokens(target, prompt, options)
    assert p_value(result.sequences, law) > 1e-5


def counting_calls(monkeypatch) -> list[int]:
    """How many continuations each call of a list of processors was given."""
    calls: list[int] = []
    original = LogitsProcessorList.__call__

    def counted(self, input_ids, scores):
        calls.append(len(input_ids))
        return original(self, input_ids, scores)

    monkeypatch.setattr(LogitsProcessorList, "__call__", counted)
    return calls


def test_without_processors_none_is_called(target, drafters, monkeypatch) -> None:
    calls = counting_calls(monkeypatch)
    config = GenerationConfig(
        do_sample=True, top_k=20, top_p=0.9, min_p=0.05, typical_p=0.9, repetition_penalty=1.0,
        no_repeat_ngram_size=0, num_beams=1, eos_token_id=[END, 3], pad_token_id=0,
    )  # fmt: skip
    for drafter in drafters.values():
        Decoder(target, drafter).generate(PROMPTS, max_new_tokens=10, generation_config=config)
    assert calls == []


def test_a_greedy_step_processes_only_what_it_may_keep(target, drafters, monkeypatch) -> None:
    calls = counting_calls(monkeypatch)
    config = GenerationConfig(repetition_penalty=1.2)
    decoder = Decoder(target, drafters["medusa:tree"])
    result = decoder.generate(PROMPTS[0], max_new_tokens=MAX_NEW, generation_config=config)
    assert set(calls) == {1} and len(calls) == len(result.sequences[0])


@pytest.mark.parametrize("options", [{"accept_top": 3}, {"accept_top": 1, "min_block": 3}])
def test_a_lossy_rule_writes_nothing_that_is_forbidden(target, make_drafter, options) -> None:
    """It accepts more than the most probable token, and what follows is processed as well."""
    forbidden = set(range(8, 40))
    config = GenerationConfig(suppress_tokens=[*forbidden], pad_token_id=0)
    result = Decoder(target, make_drafter("self", target)).generate(
        PROMPTS, max_new_tokens=MAX_NEW, verifier="top_k", generation_config=config, **options
    )
    assert not forbidden & {token for answer in result.sequences for token in answer}
    assert result.stats.tau > 1


class Counter(hf.LogitsProcessor):
    """Believes that a call is a token."""

    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return scores if self.calls < 5 else scores.flip(-1)


class NeedsMore(hf.LogitsProcessor):
    """Wants an argument that nobody passes."""

    def __call__(self, input_ids, scores, beam_indices):
        return scores


def stateful(target) -> dict[str, hf.LogitsProcessor]:
    """Processors that cannot be asked about continuations that may never come true."""
    synth = hf.SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3, keys=[3, 5, 7], sampling_table_size=64, sampling_table_seed=0,
        context_history_size=16, device=torch.device("cpu"),
    )  # fmt: skip
    return {
        "counter": Counter(),
        "arguments": NeedsMore(),
        "synthid": synth,
        "guidance": hf.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, target.model),
        "two halves": hf.ClassifierFreeGuidanceLogitsProcessor(1.5),
        "encoder": hf.EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor([[1, 2, 3]])),
        "rows": hf.RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=torch.tensor([1])),
    }


STATEFUL = ["counter", "arguments", "synthid", "guidance", "two halves", "encoder", "rows"]


@pytest.mark.parametrize("name", STATEFUL)
def test_processors_that_remember_or_know_the_batch_are_refused(target, name) -> None:
    processor = stateful(target)[name]
    with pytest.raises(UserError, match=f"logits processor {type(processor).__name__}"):
        Decoder(target).generate([9, 10], max_new_tokens=5, logits_processor=[processor])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num_beams": 4, "num_beam_groups": 2}, "num_beam_groups=2"),
        ({"num_assistant_tokens": 5}, "num_assistant_tokens=5.* chosen when a Decoder is made"),
        ({"assistant_confidence_threshold": 0.2}, "assistant_confidence_threshold=0.2"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
        ({"do_sample": True, "top_h": 0.4}, "top_h=0.4"),
        ({"do_sample": True, "epsilon_cutoff": 0.1}, "epsilon_cutoff=0.1"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate=True"),
        ({"prompt_lookup_num_tokens": 1}, "prompt_lookup_num_tokens=1"),
        ({"repetition_penalt": 1.5}, "repetition_penalt=1.5"),
        ({"temperature": 0.7}, "temperature=0.7 without do_sample"),
        ({"repetition_penalty": -1.0}, "repetition_penalty must be at least 0.01"),
        ({"repetition_penalty": 2}, "generation_config: .*float"),
        ({"bad_words_ids": [3]}, "generation_config: .*bad_words_ids"),
        ({"frequency_penalty": 3.0}, "frequency_penalty must be at most 2"),
        ({"max_length": 1}, "max_length is 1"),
        ({"stop_strings": ["."]}, "stop_strings need a tokenizer"),
        ({"suppress_tokens": list(range(VOCAB)), "do_sample": True}, "forbids every token"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_honoured_are_refused_by_name(target, options, complaint) -> None:
    with pytest.raises(UserError, match=complaint):
        Decoder(target).generate([9, 10], generation_config=GenerationConfig(**options))


def test_arguments_win_over_the_config() -> None:
    config = GenerationConfig(
        do_sample=True, temperature=0.5, top_k=7, min_p=0.1, max_new_tokens=9, max_length=50
    )
    options = read_options({"generation_config": config})
    assert options.sampling == SamplingConfig(0.5, 7, 1.0, 0.1)
    assert limit_of(options, prompt_length=48) == 9, (
        "new tokens take precedence, as in transformers"
    )
    options = read_options(
        {"generation_config": config, "max_new_tokens": 5, "temperature": 0, "top_k": 0}
    )
    assert options.sampling == SamplingConfig(0, 0, 1.0, 0.1)
    assert limit_of(options, 48) == 5
    sampled = read_options({"generation_config": GenerationConfig(do_sample=True)})
    assert sampled.sampling == SamplingConfig(1.0)
    capped = read_options({"generation_config": GenerationConfig(max_length=50)})
    assert limit_of(capped, 48) == 2
    for nothing in ({}, {"generation_config": None, "max_new_tokens": None, "temperature": None}):
        options = read_options(nothing)
        assert options.sampling.greedy and limit_of(options, 48) == 128


def test_a_models_own_settings_can_be_passed_on(target) -> None:
    own = GenerationConfig.from_dict(
        {
            "bos_token_id": 1, "pad_token_id": 1, "do_sample": True, "eos_token_id": [7, 8],
            "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20,
            "transformers_version": "4.37.0",
        }
    )  # fmt: skip
    options = read_options({"generation_config": own})
    assert options.sampling == SamplingConfig(0.7, 20, 0.8)
    assert options.eos_token_id == {7, 8} and options.generation_config.repetition_penalty == 1.05
    with_config = Decoder(target).generate(
        PROMPTS, max_new_tokens=MAX_NEW, generation_config=target.model.generation_config
    )
    assert (
        with_config.sequences == Decoder(target).generate(PROMPTS, max_new_tokens=MAX_NEW).sequences
    )


# ------------------------------------------------------------- the model's own generation config

OWN = {
    "repetition_penalty": 1.3, "suppress_tokens": list(range(0, VOCAB, 3)), "min_new_tokens": 6,
    "no_repeat_ngram_size": 2, "begin_suppress_tokens": [20, 31],
}  # fmt: skip


@pytest.fixture
def opinionated(make_target):
    """A target whose generation config has settings of its own."""
    made = make_target()
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 3, "max_length": 40}
    made.model.generation_config = GenerationConfig(**OWN, **sampling, eos_token_id=END)
    return made


@pytest.mark.parametrize("name", ["plain", "medusa:tree"])
@pytest.mark.parametrize(
    "given", [{}, {"repetition_penalty": 1.0}, {"suppress_tokens": []}, {"no_repeat_ngram_size": 3}]
)
def test_a_models_own_penalties_hold_as_in_generate(opinionated, make_drafter, name, given) -> None:
    drafter = None if name == "plain" else make_drafter(name, opinionated)
    config = GenerationConfig(**given)
    for prompt in PROMPTS:
        wanted = opinionated.model.generate(
            torch.tensor([prompt]), generation_config=config, max_new_tokens=MAX_NEW,
            do_sample=False, pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        found = Decoder(opinionated, drafter).generate(
            prompt, max_new_tokens=MAX_NEW, generation_config=config
        )
        assert found.sequences == [wanted]


def test_what_is_applied_and_what_is_not_is_told_once(opinionated, caplog) -> None:
    opinionated.model.config._name_or_path = opinionated.model.name_or_path = "opinionated"
    for _ in range(2):
        Decoder(opinionated).generate(PROMPTS[0], max_new_tokens=2)
    applied, left_out = caplog.messages
    assert "generation config of opinionated says, answers have begin_suppress_tokens" in applied
    assert "do_sample=True, max_length=40, temperature=0.6, top_k=3;" in left_out
    plain = Decoder(opinionated).generate(PROMPTS[0], use_model_defaults=False, max_new_tokens=9)
    opinionated.model.generation_config = GenerationConfig(eos_token_id=END)
    assert Decoder(opinionated).generate(PROMPTS[0], max_new_tokens=9).sequences == plain.sequences
