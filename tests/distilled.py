"""What makes answers and messages up, so that tests of what is written wait for no model."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Queue

from tiny import byte_tokenizer, tiny_llama
from transformers import PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StoppingCriteria

from drafthead.core.target.target import Target
from drafthead.infer.serving import Answer, ServeRequest
from drafthead.train.data.conversations import Conversation
from drafthead.train.distillation.answer_source import DecoderSource
from drafthead.train.distillation.answers import DistillReport, distill
from drafthead.train.distillation.distilled_file import DistilledFile
from drafthead.train.prompts.message_source import InventedMessage
from drafthead.train.settings import DistillSettings, InventSettings

INVENTING = InventSettings("fake", batch_size=4)
SETTINGS = DistillSettings(target="fake", prompts="prompts.jsonl", max_new_tokens=20)


@dataclass
class FakeDecoder:
    """Answers with a word that follows from prompt and seed, in any batch."""

    max_length: int | None = None
    delay: float = 0.0  # seconds a batch
    answer_tokens: int = 8
    tokenizer: PreTrainedTokenizerFast = field(default_factory=byte_tokenizer)
    target: Target = field(default_factory=lambda: Target(tiny_llama(vocab_size=300)))
    batches: list[list[str]] = field(default_factory=list)  # prompts as texts

    @property
    def end_ids(self) -> set[int]:
        return {self.tokenizer.eos_token_id}

    def serve(
        self,
        requests: Queue[ServeRequest | None],
        *,
        max_rows: int,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        stopping_criteria: list[StoppingCriteria],
    ) -> Iterator[Answer]:
        while (batch := self.waiting(requests, max_rows)) != [None]:
            self.batches.append([self.tokenizer.decode(request.prompt) for request in batch])
            time.sleep(self.delay)
            yield from (self.answer(request, batch, max_new_tokens) for request in batch)

    def waiting(self, requests: Queue, count: int) -> list[ServeRequest | None]:
        """What is in the queue, up to a number; it waits for one. None comes alone."""
        return [requests.get(timeout=10)] + [
            requests.get_nowait() for _ in range(min(count - 1, requests.qsize()))
        ]

    def answer(self, request: ServeRequest, batch: list[ServeRequest], limit: int) -> Answer:
        word = hashlib.md5(f"{request.prompt} {request.seed}".encode()).hexdigest()
        ids = self.tokenizer(word[: self.answer_tokens])["input_ids"]
        if self.max_length is not None:
            limit = min(limit, self.max_length - len(request.prompt))
        reason = "end_token" if len(ids) < limit else "length"
        return Answer(request.id, [*ids, self.tokenizer.eos_token_id][:limit], "", reason)


class RoundedByBatch(FakeDecoder):
    """Answers change with the other prompts of the batch, as a bfloat16 target's do."""

    def answer(self, request: ServeRequest, batch: list[ServeRequest], limit: int) -> Answer:
        seed = hash(str([other.prompt for other in batch])) + request.seed
        return super().answer(replace(request, seed=seed), batch, limit)


class SomeCut(FakeDecoder):
    """Answers to prompts of odd length are short."""

    def answer(self, request: ServeRequest, batch: list[ServeRequest], limit: int) -> Answer:
        self.answer_tokens = 5 if len(request.prompt) % 2 else 12
        return super().answer(request, batch, limit)


class FakeSource:
    """Every fifth message has no end, every seventh is one that was there before."""

    def __init__(self, settings: InventSettings = INVENTING, delay: float = 0.0):
        self.settings, self.delay = settings, delay  # seconds a batch
        self.asked: list[int] = []  # batches

    def batch(self, index: int, count: Callable[[int], None]) -> list[InventedMessage]:
        self.asked.append(index)
        time.sleep(self.delay)
        size = self.settings.batch_size
        count(3 * size)
        return [self.message(number) for number in range(index * size, (index + 1) * size)]

    def message(self, number: int) -> InventedMessage:
        topic = 0 if number % 7 == 6 else number
        text = f"What is topic {topic} about? größer"
        return InventedMessage(number, text, 3, number % 5 != 4, False)


def distilled(
    decoder: object,
    prompts: list[Conversation],
    output: Path,
    settings: DistillSettings = SETTINGS,
    overwrite: bool = False,
) -> DistillReport:
    """Distil as the verb does."""
    with DistilledFile(output, settings, overwrite) as file:
        return distill(DecoderSource(decoder), prompts, file)


def asked(count: int, turns: int = 1) -> list[Conversation]:
    """Conversations of user messages of growing length."""
    return [
        Conversation(
            f"row-{i}",
            [{"role": "user", "content": f"{turn}{'x' * i}"} for turn in range(turns)],
            f"prompts.jsonl:{i + 1}",
        )
        for i in range(count)
    ]


def rows_by_id(output: Path) -> dict[str, dict[str, object]]:
    """The rows without their batches."""
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        del row["batch"], row["batch_rows"]
    by_id = {row["id"]: row for row in rows}
    assert len(by_id) == len(rows), "a row is repeated"
    return by_id
