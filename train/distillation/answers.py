"""The target's own answers to prompts: the data that draft heads learn best from.

Each row's seed follows from its id, and the windows from the list of prompts. In a window, prompts
take the places of answers that have ended, and its rows are written together. So a run that was
killed at any moment continues with the window in which it stopped, and writes the rows that it
would have written, even where a target rounds by batch.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from queue import Queue
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError
from drafthead.heads.target.vocabulary import vocabulary_of
from drafthead.infer import Decoder
from drafthead.infer.request.prompts import Prompt
from drafthead.infer.request.stopping import FinishReason
from drafthead.infer.serving.serve_request import Answer, ServeRequest
from drafthead.train.data.answer_tokens import (
    IDS_COLUMN,
    VOCABULARY_COLUMN,
    WEIGHTS_COLUMN,
    AnswerTokens,
)
from drafthead.train.data.conversations import Conversation, Message
from drafthead.train.data.supervision import encode_prompt
from drafthead.train.distillation.output_file import DistilledFile, DistillSettings, question_hash
from drafthead.train.distillation.repetition import EndlessRepetition
from drafthead.train.jobs.console import AnswerBar
from drafthead.train.jobs.weights import weights_fingerprint

logger = logging.getLogger(__name__)

WINDOW = 8  # batches: at the end of a window rows are idle, and a kill loses what it had answered


@dataclass(frozen=True)
class DistillReport:
    """What a run did."""

    already_done: int  # rows
    written: int  # rows
    tokens: int  # written
    seconds: float
    answers_cut: int  # answers that reached max_new_tokens or the context without an EOS
    answers_repeated: int  # answers that were ended because they repeated themselves
    too_long: tuple[str, ...]  # ids of rows whose first prompt leaves no room in the context
    shortened: tuple[str, ...]  # ids of rows whose later turns did not fit and were left out


@dataclass(frozen=True)
class _Job:
    conversation: Conversation
    turns: list[list[Message]]  # each ends with the user message to answer
    question: str  # see `question_hash`
    prompt_length: int  # tokens of the first prompt


class _Dialogue:
    """A conversation while it is being answered."""

    def __init__(self, job: _Job):
        self.conversation, self.turns, self.question = job.conversation, job.turns, job.question
        self.messages: list[Message] = []
        self.answers: list[AnswerTokens] = []
        self.reasons: list[FinishReason | None] = []  # why each answer ended
        self.prompt: list[int] = []  # of the turn that was asked for last

    def request(
        self, number: int, decoder: Decoder, settings: DistillSettings
    ) -> ServeRequest | None:
        """The next turn to answer; None after the last, and if its prompt does not fit."""
        turn, limit = len(self.answers), decoder.max_length
        if turn == len(self.turns):
            return None
        messages = self.messages + self.turns[turn]
        self.prompt = encode_prompt(_tokenizer(decoder), messages, self.conversation.where)
        if limit is not None and len(self.prompt) >= limit:
            return None
        seed = row_seed(settings.seed, self.conversation.id, turn)
        return ServeRequest(self.prompt, number, seed=seed)

    def take(self, given: Answer, decoder: Decoder) -> None:
        """Add the answer to the turn that was asked for last."""
        ids = given.tokens
        finished = ids[-1] in decoder.end_ids
        text = answer_text(_tokenizer(decoder), ids, finished)
        answer: Message = {"role": "assistant", "content": text, "finished": finished}
        self.messages += [*self.turns[len(self.answers)], answer]
        self.answers.append(AnswerTokens(self.prompt, ids))
        self.reasons.append(given.finish_reason)

    @property
    def tokens(self) -> int:
        """Number of tokens that were generated."""
        return sum(len(turn.answer) for turn in self.answers)

    def row(self, settings: DistillSettings) -> dict[str, Any]:
        """The row of the output file: text for people, token ids for training."""
        return {
            "id": self.conversation.id,
            "messages": self.messages,
            "finished": all(message.get("finished", True) for message in self.messages),
            "tokens": self.tokens,
            "target": settings.target,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": settings.seed,
            "source": self.conversation.source,
            "question": self.question,
            IDS_COLUMN: [asdict(answer) for answer in self.answers],
        }


def user_turns(conversation: Conversation) -> list[list[Message]]:
    """The messages to send before each answer; answers found in the source are left out.

    [system, user 1, assistant, user 2] gives [[system, user 1], [user 2]]. Raises UserError if
    nothing is asked or if a message depends on an answer of another model (tool results).
    """
    turns: list[list[Message]] = []
    pending: list[Message] = []
    for message in conversation.messages:
        if message["role"] not in ("system", "user", "assistant"):
            raise UserError(
                f"{conversation.where}: a message of role `{message['role']}` belongs to another "
                "model's answer and cannot be replayed; remove the row"
            )
        if message["role"] == "assistant":
            continue
        pending.append(message)
        if message["role"] == "user":
            turns.append(pending)
            pending = []
    if not turns:
        raise UserError(f"{conversation.where}: no user message to answer")
    return turns


def row_seed(seed: int, row_id: str, turn: int) -> int:
    """The sampling seed of one answer, in [0, 2^63): the same in any batch and any run."""
    digest = hashlib.blake2b(f"{seed}\n{turn}\n{row_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def distill(
    decoder: Decoder, conversations: Sequence[Conversation], file: DistilledFile
) -> DistillReport:
    """Add the target's answer to every user turn of every conversation to a file that is open.

    Each conversation becomes one JSON row: id, messages (each answer with `finished`: False if it
    was cut before its EOS), tokens, settings, source, and the ids of each prompt and answer. Turns
    are answered in order, later ones after the target's own earlier answers. Rows come longest
    prompt first, not in the source's order. Rows already in the file stay as they are. Raises
    UserError for rows that were asked something else, and if no prompt fits into the context.
    """
    weights = weights_fingerprint(decoder.target)
    file.check_weights(weights)
    jobs, too_long = _jobs(decoder, _missing(conversations, file))
    if too_long and len(too_long) == len(conversations):
        raise UserError(
            f"all {len(too_long)} prompts are longer than the context of {decoder.max_length} "
            f"tokens of {file.settings.target}: use shorter prompts or another target"
        )
    _log_budget(jobs, len(conversations), file.settings)
    common = {WEIGHTS_COLUMN: weights, VOCABULARY_COLUMN: vocabulary_of(_tokenizer(decoder))}
    ended: Counter[FinishReason | None] = Counter()
    shortened = []
    with AnswerBar(sum(len(job.turns) for job in jobs)) as bar:
        for dialogues in _answer_all(decoder, jobs, file.settings, bar):
            file.append([dialogue.row(file.settings) | common for dialogue in dialogues])
            ended.update(reason for dialogue in dialogues for reason in dialogue.reasons)
            shortened += [d.conversation.id for d in dialogues if len(d.answers) < len(d.turns)]
        already = len(conversations) - len(jobs) - len(too_long)
        return DistillReport(
            already,
            len(jobs),
            bar.tokens,
            bar.seconds,
            ended["length"],
            ended["stopping_criteria"],
            tuple(too_long),
            tuple(shortened),
        )


def _missing(conversations: Sequence[Conversation], file: DistilledFile) -> list[Conversation]:
    """The conversations without a row; UserError if a row answers another question than now."""
    written = file.questions()
    for conversation in conversations:
        question = written.get(conversation.id)
        if question is not None and question != _question(user_turns(conversation)):
            raise UserError(
                f"{conversation.where} is not what row {conversation.id} of {file.path} answers: "
                "the prompts have changed; choose another --output, or --overwrite to start again"
            )
    return [conversation for conversation in conversations if conversation.id not in written]


def _question(turns: list[list[Message]]) -> str:
    return question_hash([message for turn in turns for message in turn])


def _jobs(decoder: Decoder, conversations: list[Conversation]) -> tuple[list[_Job], list[str]]:
    """What is to be answered, most turns and longest prompts first, and ids that do not fit."""
    tokenizer = _tokenizer(decoder)
    jobs: list[_Job] = []
    too_long: list[str] = []
    for conversation in conversations:
        turns = user_turns(conversation)
        length = len(encode_prompt(tokenizer, turns[0], conversation.where))
        if decoder.max_length is not None and length >= decoder.max_length:
            too_long.append(conversation.id)
        else:
            jobs.append(_Job(conversation, turns, _question(turns), length))
    # Similar lengths share a batch, and a batch that does not fit into memory fails at once.
    jobs.sort(key=lambda job: (len(job.turns), job.prompt_length), reverse=True)
    return jobs, too_long


def _log_budget(jobs: list[_Job], rows: int, settings: DistillSettings) -> None:
    answers = sum(len(job.turns) for job in jobs)
    longest = max((job.prompt_length for job in jobs), default=0)
    logger.info(
        "%d of %d conversations to answer: %d answers, at most %s new tokens; longest prompt %d; "
        "at most %d at a time",
        len(jobs),
        rows,
        answers,
        f"{answers * settings.max_new_tokens:,}",
        longest,
        settings.batch_size,
    )


def _answer_all(
    decoder: Decoder, jobs: list[_Job], settings: DistillSettings, bar: AnswerBar
) -> Iterator[list[_Dialogue]]:
    """The dialogues of one window after the other, answered."""
    size = settings.batch_size * WINDOW
    for first in range(0, len(jobs), size):
        dialogues = [_Dialogue(job) for job in jobs[first : first + size]]
        _answer_window(decoder, dialogues, settings, bar)
        yield dialogues


def _answer_window(
    decoder: Decoder, dialogues: list[_Dialogue], settings: DistillSettings, bar: AnswerBar
) -> None:
    """Answer all turns of these dialogues, later ones after earlier ones."""
    requests: Queue[ServeRequest | Prompt | None] = Queue()
    for number, dialogue in enumerate(dialogues):
        requests.put(dialogue.request(number, decoder, settings))
    left = len(dialogues)
    for answer in decoder.serve(
        requests,
        max_rows=settings.batch_size,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        stopping_criteria=[EndlessRepetition()] if settings.end_repetition else [],
    ):
        assert isinstance(answer.id, int)
        dialogue = dialogues[answer.id]
        if answer.error is not None:
            raise UserError(f"{dialogue.conversation.where}: {answer.error}")
        dialogue.take(answer, decoder)
        bar.update(len(answer.tokens), 1)
        following = dialogue.request(answer.id, decoder, settings)
        left -= following is None
        if following is not None or not left:  # None: no more requests come
            requests.put(following)


def answer_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], finished: bool) -> str:
    """The text of an answer [T] without its end token; control tokens inside it are shown.

    A message must hold them, or the next prompt would lack the marks of channels and tools.
    """
    shown = list(ids[:-1] if finished else ids)
    text = str(tokenizer.decode(shown, clean_up_tokenization_spaces=False))
    return text if finished else text.rstrip("\ufffd")  # the cut may go through a character


def _tokenizer(decoder: Decoder) -> PreTrainedTokenizerBase:
    if decoder.tokenizer is None:
        raise UserError("the target has no tokenizer, so prompts cannot be written for it")
    return decoder.tokenizer
