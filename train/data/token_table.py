"""Conversations as tokens: read, rendered and tokenised once, then mapped from an Arrow file.

A million conversations are some gigabytes of Python objects, or one file that all processes and
later runs share. `datasets` keeps it by a key of what it was made of: the content of the source,
the tokenizer and the settings. One process writes, the others wait; a file appears whole or not at
all.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import fields
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase

from drafthead.core.storage.disk_cache import cache_or_scratch
from drafthead.core.storage.files import write_text
from drafthead.core.target.chat_template import check_template_arguments, reads
from drafthead.core.target.loading import vocabulary_of
from drafthead.train.data.conversations import Conversation, Writer, iter_conversations
from drafthead.train.data.fitted_rows import Reading, fitted_rows
from drafthead.train.data.left_out import LeftOut, UnusableRowError
from drafthead.train.data.row_sources import source_digest
from drafthead.train.data.sequences import COLUMNS, TokenTable, add_to_digest, columns_of

logger = logging.getLogger(__name__)

NOTES = "notes.json"
BATCH = 1024  # sequences that are made at a time
# Of the files; raise it when other tokens are made of a conversation, or the notes have other
# fields.
VERSION = 10
# What a template may name that is no value of a row or of the tokenizer: it renders the date.
DATE = "strftime_now"
RENDERERS = ("transformers", "tokenizers", "jinja2")


def token_table(reading: Reading, tokenizer: PreTrainedTokenizerBase) -> TokenTable:
    """The source as tokens, out of the cache if it was read before.

    Raises UserError for data that cannot be read or has nothing to learn, and for template
    arguments that the tokenizer's chat template does not read.
    """
    check_template_arguments(tokenizer, reading.template_arguments)
    key = key_of(reading, tokenizer)
    folder = cache_or_scratch("tokens") / key
    notes = folder / NOTES  # are there before the rows are
    rows = partial(rows_of_source, reading, tokenizer, notes)
    try:
        data = Dataset.from_generator(rows, COLUMNS, cache_dir=str(folder), fingerprint=key)
    except DatasetGenerationError as error:  # of `datasets`, around that of the rows
        raise error.__cause__ or error from None
    record = json.loads(notes.read_text(encoding="utf-8"))
    if reading.strict and record["problems"]:  # it was read by a run that is not strict
        LeftOut(strict=True).leave(UnusableRowError(record["problems"][0]))
    for sentence in record["left_out"]:
        # The same content may have been read under another name.
        here = sentence.replace(record["source"], reading.source)
        logger.warning("%s: %s", reading.source, here)
    writers = frozenset(None if writer is None else Writer(*writer) for writer in record["writers"])
    return TokenTable(data, record["digest"], writers)


def key_of(reading: Reading, tokenizer: PreTrainedTokenizerBase) -> str:
    """A name for what the tokens depend on."""
    digest = hashlib.sha256()
    settings = {field.name: getattr(reading, field.name) for field in fields(reading)} | {
        "source": source_digest(reading.source),  # whatever its name
        "template_arguments": json.dumps(dict(reading.template_arguments), sort_keys=True),
        "strict": None,  # `token_table` compares what it asks for with the notes
    }
    parts = (
        VERSION, *map(version, RENDERERS), settings, tokenizer.chat_template,
        sorted(tokenizer.special_tokens_map.items()),  # which templates read by name
        date.today() if reads(tokenizer, DATE) else None,
    )  # fmt: skip
    digest.update(repr(parts).encode(errors="surrogatepass"))
    # A tokenizer in Python can only be used for rows that hold token ids.
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else vocabulary_of(tokenizer)
    digest.update(rules.encode(errors="surrogatepass"))
    return digest.hexdigest()[:32]


def rows_of_source(
    reading: Reading, tokenizer: PreTrainedTokenizerBase, notes: Path
) -> Iterator[dict[str, Any]]:
    """The sequences of a source as rows of COLUMNS; `notes` is written when all were read."""
    writers: set[Writer | None] = set()
    left_out, digest = LeftOut(strict=reading.strict), hashlib.sha256()

    # Of the conversation whose sequences come next.
    latest: list[str | None] = [None]

    def noted(conversations: Iterable[Conversation]) -> Iterator[Conversation]:
        """The conversations, while it is noted who answered, and what kind of request it was."""
        for conversation in conversations:
            writers.add(conversation.writer)
            latest[0] = conversation.category
            yield conversation

    conversations = iter_conversations(
        reading.source, reading.prompt_column, reading.limit, left_out
    )
    found = fitted_rows(tokenizer, noted(conversations), reading, left_out)
    rows = ((sequence, latest[0]) for sequence in found)
    while part := list(islice(rows, BATCH)):
        columns = columns_of(*map(list, zip(*part, strict=True)))
        add_to_digest(digest, columns)
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))
    record = {
        "source": reading.source,
        "digest": digest.hexdigest(),
        "writers": sorted((w and (w.name, w.weights) for w in writers), key=repr),
        "problems": left_out.problems[:1],
        "left_out": left_out.sentences(reading.max_length),
    }
    write_text(notes, json.dumps(record))
