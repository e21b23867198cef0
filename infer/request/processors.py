"""The logits processors of a request: transformers' own of its options, and a user's."""

import copy
from collections.abc import Sequence

import torch
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target

# Options whose processor counts from the end of the prompt, or to the end of the answer.
COUNT_TOKENS = (
    "min_new_tokens",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "begin_suppress_tokens",
    "frequency_penalty",
    "presence_penalty",
)
# These remember what they were called with, or hold one row of data for each row of the batch.
STATEFUL = (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


class AnswerPenalty(LogitsProcessor):
    """OpenAI's and vLLM's frequency and presence penalties, which transformers does not have.

    The score of a token that occurs c > 0 times in the answer so far (the prompt does not count)
    is lowered by `frequency` x c + `presence`.
    """

    def __init__(self, prompt_length: int, frequency: float, presence: float):
        self.prompt_length, self.frequency, self.presence = prompt_length, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The penalised scores [M, V] after input_ids [M, T]."""
        answer = input_ids[:, self.prompt_length :]
        ones = torch.ones_like(answer, dtype=scores.dtype)
        counts = torch.zeros_like(scores).scatter_add_(1, answer, ones)
        return scores - self.frequency * counts - self.presence * (counts > 0)


def processors_for(
    target: Target,
    config: GenerationConfig,
    custom: Sequence[LogitsProcessor],
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    end_ids: frozenset[int],
) -> list[LogitsProcessorList]:
    """The processors of each prompt, in transformers' order; an empty list when there are none.

    Prompts with equal processors share one list. `limits` are the most new tokens for each prompt.
    Raises UserError for options that transformers refuses, and for a custom processor that is not a
    function of its inputs alone.
    """
    for processor in custom:
        refuse_state(for_prompt(processor, 0), prompts[0], target)
    by_length = any(getattr(config, name, None) is not None for name in COUNT_TOKENS)
    by_number = any(isinstance(each, PrefixConstrainedLogitsProcessor) for each in custom)
    shared: dict[object, LogitsProcessorList] = {}
    lists = []
    for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        key = (by_length and (len(prompt), limit), by_number and number)
        if key not in shared:
            own = [for_prompt(processor, number) for processor in custom]
            shared[key] = build(target, config, own, len(prompt), limit, end_ids)
        lists.append(shared[key])
    return lists if any(lists) else []


def build(
    target: Target,
    config: GenerationConfig,
    custom: list[LogitsProcessor],
    prompt_length: int,
    limit: int,
    end_ids: frozenset[int],
) -> LogitsProcessorList:
    """The processors of `model.generate` for one prompt, without the warpers of sampling.

    Raises UserError for options that transformers refuses.
    """
    frequency = getattr(config, "frequency_penalty", None) or 0.0
    presence = getattr(config, "presence_penalty", None) or 0.0
    if frequency or presence:
        custom = [AnswerPenalty(prompt_length, frequency, presence), *custom]
    config = copy.deepcopy(config)
    config.do_sample = False
    config.max_length = prompt_length + limit
    if config.min_new_tokens is not None:  # it wins, as in `model.generate`
        config.min_length = None
    ends = torch.tensor(sorted(end_ids), device=target.device) if end_ids else None
    config._eos_token_tensor = ends
    if ends is None and config.exponential_decay_length_penalty is not None:
        raise UserError("exponential_decay_length_penalty needs an end token; the target has none")
    try:
        # transformers' private method, because answers depend on the order of the processors and
        # on which of them a custom one replaces.
        return target.model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=prompt_length,
            logits_processor=LogitsProcessorList(custom),
            device=target.device,
            model_kwargs={},
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"generation_config: {error}") from error


def for_each_prompt(
    processors: Sequence[LogitsProcessor], prompts: Sequence[Sequence[int]], target: Target
) -> list[LogitsProcessorList]:
    """Processors that are complete already, for each prompt; an empty list when there are none.

    Raises UserError for one that is not a function of its inputs alone.
    """
    count = len(prompts)
    first = [for_row(each, 0, count) for each in processors]
    for processor in first:
        refuse_state(processor, prompts[0], target)
    if first == list(processors):
        return [LogitsProcessorList(first)] * count if first else []
    return [
        LogitsProcessorList([for_row(each, number, count) for each in processors])
        for number in range(count)
    ]


def for_row(processor: LogitsProcessor, number: int, prompts: int) -> LogitsProcessor:
    """`for_prompt`, and of a repetition penalty that knows each row's padding that of one prompt.

    With beams each of the prompts has several rows there.
    """
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, torch.Tensor):
            place = number * (len(ignored) // prompts)
            return RepetitionPenaltyLogitsProcessor(processor.penalty, int(ignored[place]))
    return for_prompt(processor, number)


def for_prompt(processor: LogitsProcessor, number: int) -> LogitsProcessor:
    """The processor for prompt `number`."""
    if not isinstance(processor, PrefixConstrainedLogitsProcessor):
        return processor
    # prefix_allowed_tokens_fn(batch_id, ids) must get the number of the prompt, and not of a row in
    # one of our calls.
    function = processor._prefix_allowed_tokens_fn
    return PrefixConstrainedLogitsProcessor(lambda _, ids: function(number, ids), num_beams=1)


def refuse_state(processor: LogitsProcessor, prompt: Sequence[int], target: Target) -> None:
    """Raise UserError for a processor that remembers earlier calls or depends on the batch.

    A tree asks for many continuations of a row in one call, and most of them are not accepted, so a
    processor that expects one call a token, or one row a prompt, would be wrong. Some classes are
    known; others are found by two trial calls: with the prompt, and with the prompt twice. All
    three rows must get the same scores, and the second call must change no number, flag or string
    of the processor. Other state, such as a list that matters later, is not found.
    """
    name = type(processor).__name__
    refusal = UserError(
        f"logits processor {name} remembers earlier calls or depends on the batch; a token tree "
        "needs scores that follow from input_ids and scores alone"
    )
    if isinstance(processor, STATEFUL):
        raise refusal
    ids = torch.tensor([list(prompt)], device=target.device)
    scores = torch.linspace(-1, 1, target.vocab_size, device=target.device)[None]
    try:
        one = apply(LogitsProcessorList([processor]), ids, scores.clone())
        before = plain_attributes(processor)
        two = apply(LogitsProcessorList([processor]), ids.repeat(2, 1), scores.repeat(2, 1))
    except Exception as error:  # whatever a user's code raises
        raise UserError(f"logits processor {name} failed in a trial call: {error}") from error
    if plain_attributes(processor) != before or not two.equal(one.expand_as(two)):
        raise refusal


def apply(processors: LogitsProcessorList, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The scores [M, V] after ids [M, T], changed by one processor after the other."""
    return processors(ids, scores)  # type: ignore[arg-type]  # transformers wants a LongTensor


def plain_attributes(processor: LogitsProcessor) -> dict[str, object]:
    """The numbers, flags and strings that a processor holds; caches are left out."""
    return {k: v for k, v in vars(processor).items() if isinstance(v, bool | int | float | str)}
