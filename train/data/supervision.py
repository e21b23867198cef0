"""The tokens of a conversation that training supervises: those that the assistant wrote.

Where a row stores the ids that the target generated, these are supervised. Of a text, the
tokenizer's chat template is rendered with and without each answer, so any template works, without
`{% generation %}` tags. A base model has none: its answers continue the prompts.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from drafthead.core.errors import UserError
from drafthead.core.target.chat_template import (
    NO_ARGUMENTS,
    TemplateArguments,
    reads,
    template_options,
)
from drafthead.core.target.loading import vocabulary_of
from drafthead.infer.request.messages import Messages, as_template_reads
from drafthead.train.data.conversations import (
    IDS_COLUMN,
    AnswerTokens,
    Conversation,
    StoredTokens,
)
from drafthead.train.data.left_out import UnusableRowError
from drafthead.train.data.row_forms import Message, is_unwritten
from drafthead.train.data.sequences import SupervisedTokens

CALLS = ("tool_calls", "function_call")  # keys of messages that are the answer, or part of it
OWN_KEYS = {"role", "content", "finished"}  # of messages: what no template need read
CLOCK = "strftime_now"  # of chat templates: the present date in some format
# Goes before a chat template: its clock then shows `dates` by format, or marks of the formats.
DATED = (
    "{% set _clock = strftime_now %}{% macro strftime_now(format) %}"
    "{% if dates is none %}{{ '\ue000' + format + '\ue001' }}"
    "{% else %}{{ dates[format] or _clock(format) }}{% endif %}{% endmacro +%}"
)


@dataclass(frozen=True)
class Rendering:
    """The rendering of one conversation: the chat template, and the arguments that it gets."""

    tokenizer: PreTrainedTokenizerBase
    where: str  # the conversation, for error messages
    template_arguments: TemplateArguments = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        conversation: Conversation,
        template_arguments: TemplateArguments,
    ) -> "Rendering":
        """A conversation's own arguments go before those that rows have otherwise."""
        arguments = {**template_arguments, **conversation.template_arguments}
        return cls(tokenizer, conversation.where, arguments)

    def text(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        """The text of some messages; UnusableRowError if the template refuses them."""
        return self._as_read(messages, add_generation_prompt)[1]

    def _as_read(
        self, messages: list[Message], add_generation_prompt: bool = False
    ) -> tuple[list[Message], str]:
        """Messages in the form that the template reads, and their text; raises as `text`."""
        options = {**template_options(self.tokenizer), **self.template_arguments}

        def write(each: Messages) -> str:
            text = self.tokenizer.apply_chat_template(
                [*map(dict, each)],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **options,
            )
            str(text).encode()  # a template may cut a character in half, or find one in an argument
            return str(text)

        try:
            read, text = as_template_reads(messages, write)
        except Exception as error:  # templates are programs of their own, and raise many kinds
            roles = ", ".join(message["role"] for message in messages)
            raise UnusableRowError(
                f"{self.where}: the chat template refuses the roles {roles} ({error}); "
                "remove or merge the messages that it does not accept"
            ) from error
        return [*map(dict, read)], text

    def ids(self, messages: list[Message], add_generation_prompt: bool = False) -> list[int]:
        """Token ids [T] of some messages, or those that ask for the next answer; raises as text."""
        text = self.text(messages, add_generation_prompt)
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def dated(self, messages: list[Message], prompt: list[int]) -> "Rendering":
        """The rendering with the date that a prompt [T] of some messages shows, if it shows one.

        A template may write the date of the day, and a prompt is read again on another one. What
        the template writes around its dates is looked for in the prompt's text.
        """
        if not reads(self.tokenizer, CLOCK):
            return self
        template = self.tokenizer.get_chat_template(None, self.template_arguments.get("tools"))

        def with_dates(dates: dict[str, str] | None) -> Rendering:
            """The rendering with these dates by format, or with a mark of the format for each."""
            options = {"chat_template": DATED + template, "dates": dates}
            return replace(self, template_arguments={**self.template_arguments, **options})

        marked = with_dates(None).text(messages, add_generation_prompt=True)
        fixed, *others = re.split("\ue000(.*?)\ue001", marked, flags=re.DOTALL)
        pattern, forms = re.escape(fixed), list(dict.fromkeys(others[::2]))
        for form, text in zip(others[::2], others[1::2], strict=True):
            name = f"date{forms.index(form)}"
            again = f"(?P<{name}>" in pattern
            pattern += (f"(?P={name})" if again else f"(?P<{name}>.+?)") + re.escape(text)
        shown = str(self.tokenizer.decode(prompt, clean_up_tokenization_spaces=False))
        if (found := re.fullmatch(pattern, shown, re.DOTALL)) is None:
            return self
        return with_dates({form: found[f"date{n}"] for n, form in enumerate(forms)})

    def encode(self, messages: list[Message], text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids [T] of the rendered messages and the characters that each token covers."""
        tokenizer = self.tokenizer
        if not tokenizer.is_fast:
            raise UserError(
                f"{type(tokenizer).__name__} has no character offsets: load a fast tokenizer"
            )
        found = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        options = {**template_options(tokenizer), **self.template_arguments}
        read, _ = self._as_read(messages)
        own = tokenizer.apply_chat_template(read, return_dict=False, **options)
        if found["input_ids"] != own:
            raise UserError(
                f"{self.where}: the tokenizer's own chat encoding differs from that of the text"
            )
        return found["input_ids"], _contiguous(found["offset_mapping"])

    def answer_span(self, messages: list[Message], index: int, text: str) -> tuple[int, int] | None:
        """Return where message `index` is in the full rendering; None if it answers no prompt."""
        if messages[index]["role"] != "assistant" or index == 0:
            return None
        before, upto = messages[:index], messages[: index + 1]
        prompt = self.text(before, add_generation_prompt=True)
        shown = text if len(upto) == len(messages) else self.text(upto)
        start, end = _common(prompt, text), _common(shown, text)
        if start < len(prompt):
            # The full text may lack the end of the generation prompt (an opened <think>), but not
            # its beginning: then the user's part differs, and the span would include some of it.
            history = _common(prompt, self.text(before))
            if start <= history:
                return None
        if end < len(shown) and messages[index]["content"].strip() not in text[start:end]:
            return None
        return (start, end) if start < end else None


def refuse_missing_tokens(
    ids: Sequence[int], vocab_size: int | None, tokenizer: PreTrainedTokenizerBase, where: str
) -> None:
    """Raise UnusableRowError for an id in ids [T] beyond the target's tokens, if they are known."""
    largest = max(ids, default=0)
    if vocab_size is not None and largest >= vocab_size:
        raise UnusableRowError(
            f"{where} holds token {largest} {tokenizer.convert_ids_to_tokens(largest)}, and the "
            f"model has only {vocab_size} tokens: resize the model, or take its own tokenizer"
        )


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of control tokens: the named special tokens, and added tokens with the special flag."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added.union(tokenizer.all_special_ids))


def mark_answers(
    rendering: Rendering, messages: list[Message], context: int = 0
) -> SupervisedTokens:
    """The whole conversation's ids [T] and a mask [T] of those that the assistant has to emit.

    An answer is what the template adds to the prompt of its turn, up to and including the first
    control token after the text (the end-of-turn; a line break after it is never generated). An
    answer that the full rendering does not show as it was generated (a template that drops earlier
    reasoning, or moves the system text to the last turn) is not supervised, nor is one among the
    first `context` messages.

    Raises UserError if the template refuses the messages or the tokenizer has no offsets, and
    UnusableRowError for an answer without a text of which the template shows nothing else.
    """
    text = rendering.text(messages)
    ids, bounds = rendering.encode(messages, text)
    blank = [not text[start:end].strip() for start, end in bounds]
    controls = special_ids(rendering.tokenizer)
    mask = [False] * len(ids)
    for index, message in enumerate(messages[context:], context):
        span = rendering.answer_span(messages, index, text)
        if span is None:
            continue
        # A token that crosses a border also holds text that the assistant does not write. In
        # decoding the prompt is tokenised alone, so such a token does not occur.
        inside = [i for i, (s, e) in enumerate(bounds) if s >= span[0] and e <= span[1]]
        control = [ids[i] in controls for i in inside]
        finished = message.get("finished", True)
        emitted = inside[: _answer_length(control, [blank[i] for i in inside], finished)]
        if is_unwritten(message) and all(ids[i] in controls or blank[i] for i in emitted):
            raise UnusableRowError(
                f"{rendering.where}: message {index + 1} has no text, and the chat template writes "
                "nothing else of it: an answer that ends at once would be learnt"
            )
        for i in emitted:
            mask[i] = True
    return SupervisedTokens(ids, mask)


def _contiguous(offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Character bounds of tokens, without gaps.

    Byte-level tokenizers report " the" without its space: in "of the" the offsets are (0, 2),
    (3, 6) and the bounds (0, 2), (2, 6).
    """
    reached = 0
    bounds = []
    for start, end in offsets:
        bounds.append((min(start, reached), end))
        reached = max(reached, end)
    return bounds


def _common(left: str, right: str) -> int:
    """Length of the longest common prefix."""
    if right.startswith(left):
        return len(left)
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), len(right))


def _answer_length(control: list[bool], blank: list[bool], finished: bool) -> int:
    """Return how many tokens of a span the assistant emits.

    With the tokens  Hello  .  <|end|>  "\\n"  the tail starts at 2, and 3 tokens are emitted;
    2 if the answer was cut before its end-of-turn.
    """
    tail = len(control)
    while tail > 0 and (control[tail - 1] or blank[tail - 1]):
        tail -= 1
    if not finished:
        return tail
    return control.index(True, tail) + 1 if True in control[tail:] else len(control)


def supervise(rendering: Rendering, messages: list[Message]) -> SupervisedTokens:
    """Return what `mark_answers` finds; UnusableRowError where it is no token."""
    _refuse_hidden_calls(rendering, messages)
    marked = mark_answers(rendering, messages)
    if not any(marked.mask):
        answered = any(message["role"] == "assistant" for message in messages[1:])
        reason = (
            "the template shows no answer as the prompt of its turn asks for it"
            if answered
            else "no assistant answers a message; distill the prompts first"
        )
        raise UnusableRowError(f"0 supervised tokens in {rendering.where}: {reason}")
    return marked


def _refuse_hidden_calls(rendering: Rendering, messages: list[Message]) -> None:
    """Raise UnusableRowError for calls that the template does not write: an end would be learnt."""
    for index, message in enumerate(messages):
        for key in CALLS:
            if message["role"] != "assistant" or not message.get(key):
                continue
            if reads(rendering.tokenizer, key):
                continue
            # It may still write messages as a whole.
            without = {name: value for name, value in message.items() if name != key}
            upto = messages[: index + 1]
            if rendering.text(upto) == rendering.text([*upto[:-1], without]):
                raise UnusableRowError(
                    f"{rendering.where}: the chat template does not write the `{key}` of an answer"
                )


def supervised_sequences(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    template_arguments: TemplateArguments = NO_ARGUMENTS,
) -> list[SupervisedTokens]:
    """The sequences to learn from: of stored token ids, or else one of the text.

    `template_arguments` are those of rows that do not say otherwise. Raises UserError as
    `supervise` does, for stored ids of another tokenizer, and UnusableRowError where nothing can be
    learnt.
    """
    where = conversation.where
    if conversation.tokens is None:
        rendering = Rendering.of(tokenizer, conversation, template_arguments)
        made = [supervise(rendering, conversation.messages)]
    else:
        check_vocabulary(conversation.tokens, tokenizer, where)
        made = join_turns(conversation.tokens.answers)
    if not any(one.teaches for one in made):
        raise UnusableRowError(
            f"{where} teaches nothing: its answers have one token, and a head guesses what follows "
            "an answer's first token"
        )
    return made


def check_vocabulary(stored: StoredTokens, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Raise UserError that names `where` if the ids cannot be those of this tokenizer.

    It is an UnusableRowError if they may be, but for an id that the tokenizer does not have.
    """
    if stored.vocabulary != vocabulary_of(tokenizer):
        raise UserError(
            f"the token ids in {where} are not those of the tokenizer of "
            f"{tokenizer.name_or_path or 'this model'}: distil the prompts with this target, or "
            f"remove the column `{IDS_COLUMN}` to train on the text"
        )
    ids = (i for turn in stored.answers for i in (*turn.prompt, *turn.answer))
    largest = max(ids, default=0)
    if largest >= len(tokenizer):
        raise UnusableRowError(
            f"token id {largest} in {where} is beyond the tokenizer's {len(tokenizer)} tokens: "
            "distil the row again"
        )


def unread_by_template(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation
) -> Iterator[str]:
    """Return what a conversation brings for the chat template, and what that does not read."""
    if conversation.tokens is not None:  # was rendered when it was answered
        return
    keys = {key for message in conversation.messages for key in message} - OWN_KEYS
    for kind, names in (("argument", conversation.template_arguments), ("key of messages", keys)):
        for name in sorted(names):
            if not reads(tokenizer, name):
                yield f"{kind} `{name}`, of which the chat template knows nothing"


def join_turns(answers: Sequence[AnswerTokens]) -> list[SupervisedTokens]:
    """Each answer after its own prompt; one sequence as long as a prompt continues the one before.

    The turns ``p A`` and ``p A q B`` make the sequence p A q B with both answers supervised. Where
    a template drops earlier reasoning, the second prompt is another text, and there are two.
    """
    sequences: list[SupervisedTokens] = []
    for turn in answers:
        mask: list[bool] = []
        if sequences and turn.prompt[: len(sequences[-1].input_ids)] == sequences[-1].input_ids:
            mask = sequences.pop().mask
        mask = mask + [False] * (len(turn.prompt) - len(mask)) + [True] * len(turn.answer)
        sequences.append(SupervisedTokens(turn.prompt + turn.answer, mask))
    return sequences
