"""What a case is built of, and what its answers must be: by transformers, or by plain decoding."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from architectures import ARCHITECTURES, OTHERS, tiny_model
from cases import Case
from drafters import make_drafter
from tiny import ENCODER_DECODERS, FORCED, byte_tokenizer, tiny_encoder_decoder, words_tokenizer
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from drafthead.core.drafting.drafter import Drafter
from drafthead.core.errors import UserError
from drafthead.core.sampling import RowRandom, probabilities
from drafthead.core.target.any_target import target_of
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.drafters.draft_model import DraftModel
from drafthead.infer.drafters.store_lookup import Earlier, StoreLookup
from drafthead.infer.drafters.with_lookup import WithLookup
from drafthead.infer.request.options import read_options
from drafthead.infer.verifiers import VERIFIERS
from drafthead.lab.exactness.oracle import OracleDecoder

CLOSE = 1e-4  # logits that lie closer are a near-tie
# Of Zamba with random weights: passes over beginnings of a text are as far from one over all of it.
CLOSE_STATES = 5e-4
TRIALS = 64  # of changed logits, for tokens that are drawn
Texts = list[list[int]]


class Bans(LogitsProcessor):
    """Forbids every fifth token, counted from the last one: a function of the text alone."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(scores.shape[-1])[None] + input_ids[:, -1:]
        return scores.masked_fill(numbers % 5 == 0, -torch.inf)


class AnswerCounts(LogitsProcessor):
    """Frequency and presence penalties, which transformers has not, as OpenAI describes them."""

    def __init__(self, prompt_length: int, frequency: float, presence: float):
        self.prompt_length, self.frequency, self.presence = prompt_length, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, text in enumerate(input_ids.tolist()):
            for token, count in Counter(text[self.prompt_length :]).items():
                scores[row, token] -= count * self.frequency + self.presence
        return scores


class Multiple(StoppingCriteria):
    """Ends a text whose last two tokens are a multiple of a number together."""

    def __init__(self, number: int):
        self.number = number

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids[:, -2:].sum(1) % self.number == 0


@dataclass(frozen=True)
class Mismatch:
    """An answer that is not what it must be."""

    what: str
    prompt: Sequence[int] = ()
    seed: int = 0
    expected: Any = None
    found: Any = None
    near: bool = False

    def __str__(self) -> str:
        tie = " (near-tie)" if self.near else ""
        found = f"\n      expected {self.expected}\n      found    {self.found}"
        return f"{self.what}{tie}: prompt {list(self.prompt)}, seed {self.seed}{found}"


# ---- what is built for a case ------------------------------------------------------------------


def new_target(architecture: str, text: str) -> Target:
    """A random target with a tokenizer."""
    tokenizer = words_tokenizer() if text == "words" else byte_tokenizer()
    if architecture in ENCODER_DECODERS:
        return target_of(tiny_encoder_decoder(architecture), tokenizer)
    options = with_vocabulary((ARCHITECTURES | OTHERS)[architecture], len(tokenizer))
    return Target(tiny_model(architecture, options), tokenizer)


def with_vocabulary(options: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Options of a configuration whose vocabulary, also that of a part for texts, has this size."""
    found = {**options, "vocab_size": size}
    if "vocab_size_per_layer_input" in found:
        found["vocab_size_per_layer_input"] = size
    if "text_config" in found:
        found["text_config"] = with_vocabulary(found["text_config"], size)
    return found


same_target = lru_cache(maxsize=200)(new_target)


class Built:
    """The target, the drafter and the decoder of a case."""

    def __init__(self, case: Case):
        make = new_target if case.way in ("chat", "remembered") else same_target
        self.case, self.target = case, make(case.architecture, case.text)
        self.drafter = made_drafter(case, self.target)
        self.decoder = self.new_decoder()

    @property
    def model(self) -> PreTrainedModel:
        """The target's model."""
        return self.target.model

    def new_decoder(self) -> Decoder:
        """A decoder that remembers nothing."""
        budget = None
        if isinstance(self.case.budget, int) and self.drafter is not None:
            budgets = self.drafter.budgets
            budget = budgets[self.case.budget % len(budgets)]
        adaptive = self.case.budget == "planned"
        return Decoder(self.target, self.drafter, budget, adaptive)

    def rule(self, case: Case) -> str:
        """The rule of a case with this drafter, also where the case leaves it open."""
        if case.rule != "auto":
            return case.rule
        if not case.temperature:
            return "greedy"
        return "match" if self.drafter is None else self.drafter.sampling_rule


def made_drafter(case: Case, target: Target) -> Drafter | None:
    """The drafter that a case names."""
    name, _, branch = case.drafter.partition("+")
    if name in ("none", "hidden"):  # the second needs the answers, see `check_whole`
        return None
    if name == "answers":
        return StoreLookup(None, Earlier())
    if case.architecture not in ENCODER_DECODERS or name == "prompt-lookup":
        return make_drafter(case.drafter, target)
    small = target_of(tiny_encoder_decoder(case.architecture, seed=1))
    drafter = DraftModel(small, target, depth=3)
    return WithLookup(drafter) if branch else drafter


def config_of(case: Case) -> GenerationConfig:
    """The options that have no keyword of ours."""
    given = {} if case.own else dict(case.processors)
    others = {name: case.filters[name] for name in ("min_p", "typical_p") if name in case.filters}
    if case.ends:
        given["eos_token_id"] = list(case.ends)
    if case.chunk:
        given["prefill_chunk_size"] = case.chunk
    return GenerationConfig(do_sample=case.temperature > 0, **given, **others)


def shared_options(case: Case) -> dict[str, Any]:
    """Options of every way of decoding: all but prompts and seeds."""
    options: dict[str, Any] = {
        "max_new_tokens": case.new, "generation_config": config_of(case),
        **{name: case.filters[name] for name in ("top_k", "top_p") if name in case.filters},
        "logits_processor": [Bans()] if case.bans else [],
        "stopping_criteria": [Multiple(case.criteria)] if case.criteria else [],
    }  # fmt: skip
    if case.way != "beams":
        options |= {"verifier": case.rule, "stop_strings": list(case.stops)}
    if case.temperature:
        options["temperature"] = case.temperature
    return options


@contextmanager
def own_settings(case: Case, model: PreTrainedModel) -> Iterator[None]:
    """The model has the processors in its own generation config, where the case says so."""
    before = model.generation_config
    if case.own:
        model.generation_config = GenerationConfig(**case.processors)
    try:
        yield
    finally:
        model.generation_config = before


# ---- what an answer must be --------------------------------------------------------------------


def transformers_options(case: Case, built: Built, prompt_length: int) -> dict[str, Any]:
    """The case in transformers' words."""
    given = {} if case.own else dict(case.processors)
    penalties = [given.pop(name, 0.0) for name in ("frequency_penalty", "presence_penalty")]
    custom = [AnswerCounts(prompt_length, *penalties)] if any(penalties) else []
    custom += [Bans()] if case.bans else []
    options: dict[str, Any] = {
        **given, "do_sample": False, "pad_token_id": 0,
        "logits_processor": LogitsProcessorList(custom),
    }  # fmt: skip
    if case.ends:
        options["eos_token_id"] = list(case.ends)
    if case.criteria:
        options["stopping_criteria"] = StoppingCriteriaList([Multiple(case.criteria)])
    if case.stops:
        options |= {"stop_strings": list(case.stops), "tokenizer": built.target.tokenizer}
    return options


@torch.no_grad()
def by_transformers(case: Case, built: Built, prompt: Sequence[int], **more: Any) -> Any:
    """What `model.generate` returns for one prompt, and where its answers begin."""
    begun, new = len(prompt), case.new
    if built.model.config.is_encoder_decoder:
        begun = 2 if case.architecture in FORCED else 1
        new += begun - 1  # transformers counts the forced token
    ids = torch.tensor([list(prompt)])
    options = transformers_options(case, built, begun)
    found = built.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **options | more
    )
    return found, begun


def answer_of(case: Case, built: Built, prompt: Sequence[int], seed: int) -> list[int]:
    """The right answer: transformers' own, plain decoding's, or that of the row alone."""
    if case.temperature == 0 or case.filters.get("top_k") == 1:
        found, begun = by_transformers(case, built, prompt)
        return found[0, begun:].tolist()
    decoder, options = built.new_decoder(), shared_options(case)
    if VERIFIERS[built.rule(case)].follows:
        decoder, options["verifier"] = OracleDecoder(built.target), "match"
    return decoder.generate([list(prompt)], seed=seed, **options).sequences[0]


def is_refused(case: Case, built: Built, prompt: Sequence[int], seed: int) -> bool:
    """Whether plain decoding raises UserError: where every token is forbidden, for one."""
    options = {**shared_options(case), "verifier": "auto"}
    try:
        Decoder(built.target).generate([list(prompt)], seed=seed, **options)
    except UserError:
        return True
    return False


def answers_of(case: Case, built: Built) -> Texts:
    """The right answers to all prompts; row r has the seed of the case and r more."""
    return [
        answer_of(case, built, prompt, case.seed + row) for row, prompt in enumerate(case.prompts)
    ]


def compared(
    what: str, case: Case, built: Built, expected: Iterable[list[int]], found: Iterable[list[int]]
) -> Iterator[Mismatch]:
    """What differs of the answers to all prompts."""
    rows = zip(case.prompts, expected, found, strict=True)
    for row, (prompt, right, answer) in enumerate(rows):
        yield from differences(what, case, built, prompt, case.seed + row, right, answer)


def differences(
    what: str, case: Case, built: Built,
    prompt: Sequence[int], seed: int, expected: list[int], found: list[int],
) -> Iterator[Mismatch]:  # fmt: skip
    """What is wrong with one answer."""
    yield from (
        Mismatch(f"{what}: {fault}", prompt, seed, None, found)
        for fault in broken_promises(case, built, prompt, found)
    )
    if case.rule == "top_k" or expected == found:
        return
    near = is_near_tie(case, built, prompt, seed, expected, found)
    yield Mismatch(what, prompt, seed, expected, found, near)


def broken_promises(
    case: Case, built: Built, prompt: Sequence[int], answer: Sequence[int]
) -> Iterator[str]:
    """What no answer may hold, whatever the rule."""
    options = case.processors
    if not 1 <= len(answer) <= case.new:
        yield f"{len(answer)} tokens, where 1 to {case.new} are allowed"
    forced = {options.get("forced_eos_token_id")}
    if {*answer[:-1]} & {*case.ends}:
        yield "the answer goes on after an end token"
    barred = {*options.get("suppress_tokens", ())}
    barred |= {ids[0] for ids in options.get("bad_words_ids", ()) if len(ids) == 1} - {*case.ends}
    if barred & {*answer} - forced:
        yield f"forbidden tokens {sorted(barred & {*answer})}"
    if {*answer[:1]} & {*options.get("begin_suppress_tokens", ())} - forced:
        yield f"forbidden first token {answer[0]}"
    least = options.get("min_new_tokens", 0)
    if len(answer) < least and {*answer[-1:]} & ({*case.ends} - forced):
        yield f"an end after {len(answer)} tokens, before {least}"
    text, size = [*prompt, *answer], options.get("no_repeat_ngram_size", 0)
    if size and not built.model.config.is_encoder_decoder and not forced & {*answer[-1:]}:
        grams = [tuple(text[n : n + size]) for n in range(len(text) - size + 1)]
        late = grams[max(0, len(prompt) - size + 1) :]
        if any(gram in grams[: len(grams) - len(late) + n] for n, gram in enumerate(late)):
            yield f"{size} tokens are said again"
    if case.bans and not forced & {*answer[-1:]}:
        pairs = zip([prompt[-1], *answer], answer, strict=False)
        if not built.model.config.is_encoder_decoder and any((a + b) % 5 == 0 for a, b in pairs):
            yield "a token that the caller's processor forbids"


@torch.no_grad()
def is_near_tie(
    case: Case, built: Built, prompt: Sequence[int], seed: int,
    expected: list[int], found: list[int],
) -> bool:  # fmt: skip
    """Whether rounding may have decided where two answers part."""
    place = next((n for n, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    if place is None:
        return False
    options = {**shared_options(case), "verifier": "auto"}
    request = Decoder(built.target).request([list(prompt)], read_options(options))
    ids = torch.tensor([expected[:place]], dtype=torch.long)
    logits = built.target.plain_logits(prompt, ids, 1)[0]  # [1, V]
    text = torch.tensor([[*request.prefixes[0], *expected[:place]]])
    sampling = request.sampling

    def processed(scores: torch.Tensor) -> torch.Tensor:
        return request.processors[0](text, scores.float()) if request.processors else scores

    if sampling.greedy:
        scores = processed(logits)[0]
        return abs(float(scores[expected[place]] - scores[found[place]])) < CLOSE
    numbers = RowRandom([seed], torch.device("cpu"))
    numbers.begin_step([place])
    generator = torch.Generator().manual_seed(0)
    tokens = set()
    for _ in range(TRIALS):
        noise = torch.rand(logits.shape, generator=generator) - 0.5
        probs = probabilities(processed(logits + CLOSE * noise), sampling)
        tokens.add(int(numbers.token(probs, numbers.ahead(1)[:, 0])))
    return {expected[place], found[place]} <= tokens
