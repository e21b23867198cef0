"""A request: what to decode and how, as every step reads it.

`DecodeOptions` declares the options of a call; `read_options` reads them from what users write.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from pydantic import BeforeValidator, Field, SkipValidation
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from drafthead.core.drafting.form import form_of
from drafthead.core.errors import UserError
from drafthead.core.sampling import RowSampling, SamplingConfig, warped
from drafthead.core.settings import (
    AtLeastOne,
    Flag,
    Integer,
    MaxNewTokens,
    NotNegative,
    Number,
    called,
    checked,
    plain,
    settings,
)
from drafthead.infer.request.stopping import Stop

DEFAULT_MAX_NEW_TOKENS = 128
TOKENIZED = ("input_ids", "token_type_ids", "mm_token_type_ids")  # of a tokenizer's output


def stops_of(stops: object) -> tuple[str, ...]:
    """Texts that end an answer, of one or several."""
    given = [stops] if isinstance(stops, str) else stops
    if not isinstance(given, Collection) or not all(
        isinstance(each, str) and each for each in given
    ):
        raise ValueError("must be texts that are not empty")
    return tuple(given)


def stopping_of(stopping: object) -> object:
    """The rule that ends a beam search."""
    if not isinstance(stopping, bool) and stopping != "never":
        raise ValueError('must be True, False or "never"')
    return stopping


def seconds_of(seconds: object) -> object:
    """Seconds that answers may take."""
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise ValueError("must be a number of seconds above 0")
    return seconds


def unpacked(values: Any) -> Any:
    """The numbers of an array or a tensor; anything else as it is."""
    return values.tolist() if hasattr(values, "tolist") else values


def seeds_of(seed: object) -> int | list[int]:
    """One seed, or a list of seeds."""
    seeds = unpacked(seed)
    if isinstance(seeds, Sequence) and not isinstance(seeds, str):
        return [checked("a seed", Integer, each) for each in seeds]
    return checked("seed", Integer, seeds)


def arguments_of(arguments: object) -> object:
    """Arguments of the chat template by name."""
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        raise ValueError("must be a mapping of names, as {'enable_thinking': False}")
    return arguments


def tokens_of(ids: object) -> frozenset[int]:
    """One token, or several."""
    values = unpacked(ids)
    several = values if isinstance(values, Collection) and not isinstance(values, str) else [values]
    tokens = [plain(each) for each in several]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise ValueError("must be an integer, or several")
    return frozenset(tokens)


TokenRows: TypeAlias = Annotated[
    torch.Tensor | np.ndarray | Sequence[int] | Sequence[Sequence[int]] | None, SkipValidation
]
EarlyStopping: TypeAlias = Annotated[bool | Literal["never"], BeforeValidator(stopping_of)]
TokenIds: TypeAlias = Annotated[frozenset[int], BeforeValidator(tokens_of)]


class TokenRecord(ABC):
    """A record of the scores of each row's tokens as steps commit them, in their order."""

    rows: dict[int, Any]  # by number

    def add(
        self,
        numbers: Sequence[int | None],  # of the rows of these tensors; None for rows that ended
        sampling: RowSampling,  # of these rows
        logits: torch.Tensor,  # [B, P, V] of the target
        scores: torch.Tensor,  # [B, P, V] the same after the logits processors
        tokens: Sequence[Sequence[int]],  # chosen from them, up to P in each row
    ) -> None:
        """Record the next tokens of each active row."""
        for number, law, row_logits, row_scores, chosen in zip(
            numbers, sampling.rows, logits, scores, tokens, strict=True
        ):
            if number is None:
                continue
            processed = row_scores[: len(chosen)].float()
            if not law.greedy:
                processed = warped(processed, law)
            # NO_TOKEN ends in an error as soon as the batch has it.
            ids = torch.tensor(chosen, device=logits.device).clamp_min(0)
            self.keep(number, row_logits[: len(chosen)].float(), processed, ids)

    def take_rows(self, rows: Sequence[tuple[Any, int]]) -> None:
        """Go on with rows of records, each the row of that number; they are numbered again."""
        taken = {place: record.rows[number] for place, (record, number) in enumerate(rows)}
        self.rows.clear()
        self.rows.update(taken)

    @abstractmethod
    def keep(
        self,
        number: int,
        logits: torch.Tensor,  # [P, V] float32
        scores: torch.Tensor,  # [P, V] float32
        tokens: torch.Tensor,  # [P]
    ) -> None:
        """Record the next tokens of row `number`."""


@settings
class BeamOptions:
    """The options of beam search, under the names of `GenerationConfig`.

    The answers are those of `model.generate`. Without sampling, verifier, streamer, logprobs,
    max_time, stop strings and stopping criteria.
    """

    num_beams: Annotated[Integer, Field(ge=1, le=8)] = 1  # W; 1 is off
    length_penalty: Number = 1.0  # an answer's score is divided by its length to this power
    # When a prompt's search ends before the limit: with True as soon as there are W answers; with
    # False when a beam that ended now could not be one of the W best; with "never" when none that
    # ended later could.
    early_stopping: EarlyStopping = False
    # Answers to each prompt, which follow each other in the result: of a beam search the best ones.
    num_return_sequences: Annotated[AtLeastOne, called("n")] = 1

    def __post_init__(self) -> None:
        if 1 < self.num_beams < self.num_return_sequences:
            raise UserError(
                f"num_return_sequences must be between 1 and num_beams={self.num_beams}, got "
                f"{self.num_return_sequences}"
            )


@settings
class DecodeOptions:
    """The options of `Decoder.generate`, `stream` and `steps`: keywords after the prompts.

    Beside these the fields of `SamplingConfig` and `BeamOptions` are keywords, and those of the
    acceptance rule that is named. Without any decoding is greedy, of up to 128 tokens, and nothing
    is filtered. Keywords win over `generation_config`. None is the same as leaving an option out,
    except for `seed`. Numbers may be NumPy's, or tensors without dimensions.
    """

    # The end of the target's context may cut an answer sooner. None: max_length alone limits it.
    max_new_tokens: MaxNewTokens | None = DEFAULT_MAX_NEW_TOKENS
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    beams: BeamOptions | None = None  # None: no beam search
    # The acceptance rule. "auto" is a lossless one: `greedy` at temperature 0; above it `match`,
    # or `traversal` with a draft model that is not recorded. Lossy ones are used only by name.
    verifier: Annotated[str, called("rule")] = "auto"
    rule_options: Mapping[str, Any] = field(default_factory=dict)  # of the rule, where given
    # A row's answer depends on its own seed alone: one seed for each row, or an int from which the
    # rows count upwards. None takes an int from the operating system. Under `match` the drafter and
    # its trees do not matter either; under the other sampling rules the text also depends on the
    # size of the tree, so the planner leaves that as it is at first (tree_nodes).
    seed: Annotated[int | list[int], BeforeValidator(seeds_of)] = 0
    # 1 for tokens, 0 for padding at the beginning or end of a row, in the shape of prompts that are
    # token ids [T] or [B, T]. A tokenizer's output brings its own.
    attention_mask: TokenRows = None
    # Prompts as token ids by the name that tokenizers give them, in place of the first argument:
    # `generate(**tokenizer(...))`. The marks beside them must not be of images.
    input_ids: TokenRows = None
    token_type_ids: TokenRows = None
    mm_token_type_ids: TokenRows = None
    # Whether the answer goes on with the last of the messages (True) or is a turn of its own
    # (False). By default it is a turn, and messages that end with the assistant's are refused.
    continue_final_message: Flag | None = None
    # Above 1 only with sampling, or with beam search.
    num_return_sequences: Annotated[AtLeastOne, called("n")] = 1
    # Seconds after which answers end as they are; looked at after each step.
    max_time: Annotated[float, BeforeValidator(seconds_of)] | None = None
    # Texts that end an answer; the token that completes one is kept whole.
    stop_strings: Annotated[
        tuple[str, ...], BeforeValidator(stops_of), called("stop", "stop_sequences", "stop_words")
    ] = ()
    # Of `generate` with one prompt: gets the prompt's tokens and then each new one, as streamers of
    # `model.generate` do.
    streamer: Annotated[BaseStreamer | None, SkipValidation] = None
    # Record the log-probability of each token, and those of the target's so many most probable ones
    # beside it (0: of none). On a GPU steps are then not one graph, only their passes are.
    logprobs: Annotated[NotNegative, called("top_logprobs")] | None = None
    # Whether penalties, n-grams and suppressed tokens that are not given come from the model's own
    # generation_config.json, as in `model.generate`.
    use_model_defaults: Flag = True
    # More options under transformers' names. Penalties, n-grams, bad words, forced and suppressed
    # tokens are keywords too (`Processors`), and so are `frequency_penalty` and
    # `presence_penalty`, which transformers lacks. What cannot be honoured raises UserError.
    generation_config: GenerationConfig = field(default_factory=GenerationConfig)
    # Arguments of the chat template for prompts that are texts or messages, as `tools`, `documents`
    # or `enable_thinking` are. What the template does not read is refused.
    chat_template_kwargs: Annotated[Mapping[str, Any], BeforeValidator(arguments_of)] = field(
        default_factory=dict
    )
    # Called after every node of a token tree, as in `model.generate` after every token, so they
    # must be functions of `input_ids` and `scores` alone.
    logits_processor: Annotated[Sequence[LogitsProcessor], SkipValidation] = ()
    # Asked row by row after every token whether the answer ends there.
    stopping_criteria: Annotated[Sequence[StoppingCriteria], SkipValidation] = ()
    # Of a `generation_config`:
    max_length: Integer | None = None  # of prompt and answer together
    eos_token_id: TokenIds | None = None  # what ends answers; None: the target's own
    prefill_chunk_size: AtLeastOne | None = None  # positions of each prompt that one pass reads

    @property
    def tokenized(self) -> dict[str, Any]:
        """The prompts that came by the names of a tokenizer's output."""
        named = {name: getattr(self, name) for name in TOKENIZED}
        return {name: value for name, value in named.items() if value is not None}


@lru_cache  # each step asks again for each row
def at_temperature(sampling: SamplingConfig, temperature: float) -> SamplingConfig:
    """A way of sampling, but at another temperature."""
    return replace(sampling, temperature=temperature)


@dataclass(frozen=True, kw_only=True)
class Request(DecodeOptions):
    """A call to decode: its options, with its prompts as token ids."""

    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]  # most new tokens, for each prompt
    seeds: Sequence[int]  # one for each prompt
    drafts: frozenset[str] | None = None  # names of what may draft; None: all that there is
    end_ids: frozenset[int] = frozenset()
    processors: Sequence[LogitsProcessorList] = ()  # one for each prompt, or none at all
    stops: Sequence[Stop] = ()  # one for each prompt, or none at all
    draft_temperature: float | None = None  # at which children are drawn; None: as the target's
    new_record: Callable[[], TokenRecord] | None = None  # of tokens' scores; None: none is kept
    # What processors read before an answer where it is not the prompt: the prompt with padding.
    prefixes: Sequence[Sequence[int]] | None = None
    cache_salt: str = ""  # what was read is known to requests of the same salt alone

    @property
    def in_form(self) -> bool:
        """Whether an answer has to keep to a form."""
        return any(form_of(processors) is not None for processors in self.processors)

    def draft_sampling(self, sampling: SamplingConfig) -> SamplingConfig:
        """The sampling that turns a draft's logits into the distribution of such a row's children.

        Any distribution that is known before the draw keeps the output exact.
        """
        if self.draft_temperature is None or sampling.greedy:
            return sampling
        return at_temperature(sampling, self.draft_temperature)

    @property
    def samples_in_graphs(self) -> bool:
        """Whether a step's graph can compute the target's law: no processors, no `typical_p`."""
        return self.sampling.typical_p == 1 and not self.processors
