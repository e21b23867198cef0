"""`serve --record`: answers as rows that training reads, in the form of `data distill`."""

import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from drafthead.core.errors import UserError, first_line
from drafthead.core.storage.row_file import RowFile
from drafthead.core.target.loading import vocabulary_of
from drafthead.core.target.weights_hash import weights_fingerprint
from drafthead.infer import Decoder
from drafthead.infer.request.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """The source of a recorded answer: the messages, or the text, that it is the answer to."""

    messages: Sequence[Mapping[str, Any]]
    arguments: Mapping[str, Any]  # of the chat template


class Recorder:
    """The file of the answers of a server or of several, up to so many bytes.

    Rows are written in a thread of its own. What is no text of the target alone is left out:
    answers in a form, with penalties or biases, by a lossy rule, those that a client asks not to
    store, and what follows an answer's end.
    """

    def __init__(self, path: Path, most_bytes: int, decoder: Decoder, target: str):
        """Goes on with a file of the same target; raises UserError for another, or no place."""
        assert decoder.tokenizer is not None
        self.path, self.most_bytes, self.tokenizer = path, most_bytes, decoder.tokenizer
        self.end_ids = frozenset(decoder.end_ids)
        self.about = {
            "target": target,
            "vocabulary": vocabulary_of(decoder.tokenizer),
            "target_weights": weights_fingerprint(decoder.target),
        }
        self.file = RowFile(path, private=True)  # these are users' messages
        try:
            first = json.loads(next(self.file.rows(), "null")) or self.about
            is_ours = all(
                first.get(name) == self.about[name] for name in self.about if name != "target"
            )
        except (AttributeError, ValueError):
            is_ours = False
        if not is_ours:
            raise UserError(
                f"{path} has no answers of this model: choose another file to record in"
            )
        self.file.cut()
        self.full, self.writing = False, ThreadPoolExecutor(1, thread_name_prefix="recording")
        logger.warning(
            "answers are recorded with their prompts in %s, up to %d MiB: tell your users",
            path,
            most_bytes >> 20,
        )

    def note(self, source: Source, request: Request, answer: Sequence[int], reason: str) -> None:
        """Record an answer [T] and why it ended; called by the decoding thread."""
        if not self.full:
            writing = self.writing.submit(self._write, source, request, [*answer], reason)
            writing.add_done_callback(self._look_at)

    def _look_at(self, writing: Future[None]) -> None:
        """Stop recording where a row could not be made or written; answers go on."""
        if (error := writing.exception()) is not None and not self.full:
            self.full = True
            logger.warning("no more answers are recorded: %s", first_line(error))

    def _write(self, source: Source, request: Request, answer: list[int], reason: str) -> None:
        if self.full:  # since this row was noted
            return
        ends = request.end_ids or self.end_ids  # none of a request that ignores them
        finished = not ends.isdisjoint(answer)
        if finished:
            last = next(place for place, token in enumerate(answer) if token in ends)
            answer, reason = answer[: last + 1], "stop"
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
        self.file.append(line, self.most_bytes)

    def close(self) -> None:
        """Write what waits, and close the file."""
        self.writing.shutdown()
        self.file.close()
