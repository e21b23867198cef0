"""`serve --record`: answers as rows that training reads, in the form of `data distill`."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from secrets import token_hex
from typing import Any

from drafthead.core.errors import UserError, first_line
from drafthead.core.target.loading import vocabulary_of
from drafthead.core.target.weights_hash import weights_fingerprint
from drafthead.infer import Decoder
from drafthead.infer.request.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """What an answer is recorded with: the messages, or the text, that it is the answer to."""

    messages: Sequence[Mapping[str, Any]]
    arguments: Mapping[str, Any]  # of the chat template


class Recorder:
    """The file of a server's answers, up to so many bytes; rows are written in a thread of its own.

    What is no text of the target alone is left out: answers in a form, with penalties or biases, by
    a lossy rule, and those that a client asks not to store.
    """

    def __init__(self, path: Path, most_bytes: int, decoder: Decoder, target: str):
        """Goes on with a file of the same target; raises UserError for another, or no place."""
        assert decoder.tokenizer is not None
        self.path, self.most_bytes, self.tokenizer = path, most_bytes, decoder.tokenizer
        self.about = {
            "target": target,
            "vocabulary": vocabulary_of(decoder.tokenizer),
            "target_weights": weights_fingerprint(decoder.target),
        }
        try:
            # Only for whoever runs the server: these are users' messages.
            self.file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
            self._go_on()
        except (OSError, ValueError) as error:
            raise UserError(f"answers cannot be recorded in {path}: {first_line(error)}") from error
        self.full, self.writing = False, ThreadPoolExecutor(1, thread_name_prefix="recording")
        logger.warning(
            "answers are recorded with their prompts in %s, up to %d MiB: tell your users",
            path,
            most_bytes >> 20,
        )

    def _go_on(self) -> None:
        """Cut off what a kill has left of a row; ValueError where other rows are there."""
        if first := self.file.readline():
            row = json.loads(first)
            if any(row.get(name) != self.about[name] for name in ("vocabulary", "target_weights")):
                raise ValueError("it holds answers of another model: choose another file")
        self.size = 0
        if self.file.seek(0, os.SEEK_END):
            with mmap(self.file.fileno(), 0, access=ACCESS_READ) as lines:
                self.size = lines.rfind(b"\n") + 1
        self.file.truncate(self.size)
        self.file.seek(self.size)

    def note(self, source: Source, request: Request, answer: Sequence[int], reason: str) -> None:
        """Record an answer [T] and why it ended; called by the decoding thread."""
        if not self.full:
            writing = self.writing.submit(self._write, source, request, [*answer], reason)
            writing.add_done_callback(self._look_at)

    def _look_at(self, writing: Future[None]) -> None:
        """Stop recording where a row could not be made or written; answers go on."""
        if (error := writing.exception()) is not None and not self.full:
            self.full = True
            reason = first_line(error)
            logger.warning("%s: no more answers are recorded: %s", self.path, reason)

    def _write(self, source: Source, request: Request, answer: list[int], reason: str) -> None:
        if self.full:  # since this row was noted; a part of one may end the file
            return
        finished = bool(answer) and answer[-1] in request.end_ids
        text = self.tokenizer.decode(answer[:-1] if finished else answer)
        said = {"role": "assistant", "content": text, "finished": finished}
        tools = {name: source.arguments[name] for name in ("tools",) if name in source.arguments}
        others = {name: value for name, value in source.arguments.items() if name not in tools}
        row = {
            "id": f"served-{token_hex(8)}",
            "messages": [*source.messages, said],
            "finished": finished,
            "tokens": len(answer),
            **self.about,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "seed": request.seeds[0],
            "source": "served",
            "finish_reasons": [reason],
            "token_ids": [{"prompt": [*request.prompts[0]], "answer": answer}],
            **tools,
            **({"chat_template_kwargs": others} if others else {}),
        }
        line = json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n"
        if self.size + len(line) > self.most_bytes:
            raise UserError(f"{self.most_bytes >> 20} MiB are full")
        self.file.write(line)
        self.file.flush()
        self.size += len(line)

    def close(self) -> None:
        """Write what waits, and close the file."""
        self.writing.shutdown()
        self.file.close()
