"""The target's own answers to prompts: the data that draft heads learn best from.

Rows are appended and flushed one by one, and each row's seed follows from its id. So a run that was
killed at any moment continues where it stopped and writes the same rows. A manifest beside the
output keeps runs with other settings out of the file.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from drafthead.heads.errors import UserError
from drafthead.infer import Decoder
from drafthead.train.answer_tokens import AnswerTokens, StoredTokens, vocabulary_of
from drafthead.train.conversations import Conversation, Message
from drafthead.train.supervision import encode_prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DistillSettings:
    """Everything that decides the content of the rows; a resumed run must have the same."""

    target: str
    prompts: str
    max_new_tokens: int = 256  # for each answer
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    seed: int = 0
    prompt_column: str | None = None
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise UserError(f"temperature must not be negative, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie in (0, 1], got {self.top_p}")


@dataclass(frozen=True)
class DistillReport:
    """What a run did."""

    already_done: int  # rows
    written: int  # rows
    tokens: int  # written
    seconds: float
    answers_cut: int  # answers that reached max_new_tokens or the context without an EOS
    too_long: tuple[str, ...]  # ids of rows whose first prompt leaves no room in the context
    shortened: tuple[str, ...]  # ids of rows whose later turns did not fit and were left out


@dataclass(frozen=True)
class _Job:
    conversation: Conversation
    turns: list[list[Message]]  # each ends with the user message to answer
    prompt_length: int  # tokens of the first prompt


class _Dialogue:
    """A conversation while it is being answered."""

    def __init__(self, job: _Job):
        self.conversation = job.conversation
        self.turns = job.turns
        self.messages: list[Message] = []
        self.answers: list[AnswerTokens] = []

    @property
    def tokens(self) -> int:
        """Number of tokens that were generated."""
        return sum(len(turn.answer) for turn in self.answers)

    def row(self, settings: DistillSettings, vocabulary: str) -> dict[str, Any]:
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
            **StoredTokens(tuple(self.answers), vocabulary).columns(),
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


def manifest_path(output: Path) -> Path:
    """The JSON file beside the output that records the settings."""
    # Not *.json: a folder of outputs can be read as training data.
    return output.with_name(output.name + ".manifest")


def prepare_output(output: Path, settings: DistillSettings, overwrite: bool) -> set[str]:
    """Ids already in the output; writes the manifest of a new one.

    A half-written last line of a killed run is cut off. Raises UserError if the file belongs to a
    run with other settings or to no run.
    """
    if overwrite:
        output.unlink(missing_ok=True)
    if _begun(output):
        check_settings(output, settings)
        return _ids_written(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    manifest = manifest_path(output)
    temporary = manifest.with_name(manifest.name + ".tmp")
    temporary.write_text(json.dumps(asdict(settings), indent=2) + "\n", encoding="utf-8")
    temporary.replace(manifest)
    return set()


def _begun(output: Path) -> bool:
    return output.exists() and output.stat().st_size > 0


def check_settings(output: Path, settings: DistillSettings) -> None:
    """Raise UserError if the output was begun with other settings or by no distillation."""
    if not _begun(output):
        return
    manifest = manifest_path(output)
    if not manifest.exists():
        raise UserError(
            f"{output} exists without {manifest.name}, so its settings are unknown: choose another "
            "--output, or --overwrite to start again"
        )
    try:
        recorded = json.loads(manifest.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{manifest} is not valid JSON ({error.msg}): use --overwrite") from error
    for key, value in asdict(settings).items():
        if recorded.get(key) != value:
            raise UserError(
                f"{output} was begun with {key} {recorded.get(key)!r}, now {value!r}: give the "
                "same settings, another --output, or --overwrite to start again"
            )


def _ids_written(output: Path) -> set[str]:
    content = output.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        logger.info("%s: dropped a half-written last line", output)
        with output.open("r+b") as file:
            file.truncate(whole)
    ids = set()
    for number, line in enumerate(content[:whole].splitlines(), start=1):
        try:
            ids.add(json.loads(line)["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{output}, line {number}: not a row of a distillation ({error}); "
                "use --overwrite to start again"
            ) from error
    return ids


def distill(
    decoder: Decoder,
    conversations: Sequence[Conversation],
    output: Path,
    settings: DistillSettings,
    batch_size: int = 32,
    overwrite: bool = False,
) -> DistillReport:
    """Append the target's answer to every user turn of every conversation to `output`.

    Each conversation becomes one JSON row: id, messages (each answer with `finished`: False if it
    was cut before its EOS), tokens, settings, source, and the ids of each prompt and answer. Turns
    are answered in order, later ones after the target's own earlier answers. Rows come longest
    prompt first, not in the source's order.
    Rows already in the output stay as they are. Raises UserError for settings that differ from
    those of the output, and if no prompt fits into the context.
    """
    if batch_size < 1:
        raise UserError(f"the batch size must be at least 1, got {batch_size}")
    done = prepare_output(output, settings, overwrite)
    jobs, too_long = _jobs(decoder, [c for c in conversations if c.id not in done])
    if too_long and len(too_long) == len(conversations):
        raise UserError(
            f"all {len(too_long)} prompts are longer than the context of {decoder.max_length} "
            f"tokens of {settings.target}: use shorter prompts or another target"
        )
    _log_budget(jobs, len(conversations), settings)
    vocabulary = vocabulary_of(_tokenizer(decoder))
    started = time.perf_counter()
    written = tokens = cut = 0
    shortened: list[str] = []
    with (
        output.open("a", encoding="utf-8") as file,
        tqdm(total=len(jobs), desc="distill", unit="row") as bar,
    ):
        for dialogue in _answer_all(decoder, jobs, settings, batch_size):
            file.write(json.dumps(dialogue.row(settings, vocabulary), ensure_ascii=False) + "\n")
            file.flush()
            written, tokens = written + 1, tokens + dialogue.tokens
            cut += sum(not message.get("finished", True) for message in dialogue.messages)
            if len(dialogue.answers) < len(dialogue.turns):
                shortened.append(dialogue.conversation.id)
            speed = tokens / (time.perf_counter() - started)
            bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=False)
            bar.update()
    seconds = time.perf_counter() - started
    already = len(conversations) - len(jobs) - len(too_long)
    return DistillReport(already, written, tokens, seconds, cut, tuple(too_long), tuple(shortened))


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
            jobs.append(_Job(conversation, turns, length))
    # Similar lengths share a batch, and a batch that does not fit into memory fails at once.
    jobs.sort(key=lambda job: (len(job.turns), job.prompt_length), reverse=True)
    return jobs, too_long


def _log_budget(jobs: list[_Job], rows: int, settings: DistillSettings) -> None:
    answers = sum(len(job.turns) for job in jobs)
    longest = max((job.prompt_length for job in jobs), default=0)
    logger.info(
        "%d of %d conversations to answer: %d answers, at most %s new tokens; longest prompt %d",
        len(jobs),
        rows,
        answers,
        f"{answers * settings.max_new_tokens:,}",
        longest,
    )


def _answer_all(
    decoder: Decoder, jobs: list[_Job], settings: DistillSettings, batch_size: int
) -> Iterator[_Dialogue]:
    for first in range(0, len(jobs), batch_size):
        dialogues = [_Dialogue(job) for job in jobs[first : first + batch_size]]
        for turn in range(max(len(dialogue.turns) for dialogue in dialogues)):
            _answer_turn(decoder, dialogues, turn, settings)
        yield from dialogues


def _answer_turn(
    decoder: Decoder, dialogues: list[_Dialogue], turn: int, settings: DistillSettings
) -> None:
    """Answer user turn `turn` of all dialogues that have one and whose prompt fits."""
    tokenizer, limit = _tokenizer(decoder), decoder.max_length
    asked: list[_Dialogue] = []
    prompts: list[list[int]] = []
    for dialogue in dialogues:
        if turn >= len(dialogue.turns) or len(dialogue.answers) < turn:
            continue
        messages = dialogue.messages + dialogue.turns[turn]
        prompt = encode_prompt(tokenizer, messages, dialogue.conversation.where)
        if limit is None or len(prompt) < limit:
            asked.append(dialogue)
            prompts.append(prompt)
    if not asked:
        return
    answers = decoder.generate(
        prompts,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=[row_seed(settings.seed, d.conversation.id, turn) for d in asked],
    )
    rows = zip(asked, prompts, answers.sequences, answers.finished, strict=True)
    for dialogue, prompt, ids, finished in rows:
        text = answer_text(tokenizer, ids, finished)
        answer = {"role": "assistant", "content": text, "finished": finished}
        dialogue.messages += [*dialogue.turns[turn], answer]
        dialogue.answers.append(AnswerTokens(prompt, ids))


def answer_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], finished: bool) -> str:
    """The text of an answer [T] without its end token; control tokens inside it are shown.

    A message must hold them, or the next prompt would lack the marks of channels and tools.
    """
    shown = ids[:-1] if finished else ids
    text = str(tokenizer.decode(shown, clean_up_tokenization_spaces=False))
    return text if finished else text.rstrip("\ufffd")  # the cut may go through a character


def _tokenizer(decoder: Decoder) -> PreTrainedTokenizerBase:
    if decoder.tokenizer is None:
        raise UserError("the target has no tokenizer, so prompts cannot be written for it")
    return decoder.tokenizer
