"""A target, and what it has written, for drafters that look texts up."""

from pathlib import Path

import pytest
from tiny import byte_tokenizer, tiny_llama

from drafthead.core.target.loading import vocabulary_of
from drafthead.core.target.target import Target
from drafthead.infer import Decoder
from drafthead.infer.drafters.ngram_table import NgramTable

SAMPLED = {"temperature": 0.5, "seed": 0}


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Path:
    """A target that repeats itself, with a tokenizer, and a table of its answers."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = byte_tokenizer()
    model = tiny_llama(vocab_size=len(tokenizer), initializer_range=0.3)
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    decoder, prompts = Decoder(Target(model)), [[30, 31, n] for n in range(40, 60)]
    answers = [
        answer
        for sampled in ({}, SAMPLED)
        for answer in decoder.generate(prompts, max_new_tokens=40, **sampled).sequences
    ]
    (folder / "store").mkdir()
    NgramTable.of(answers, vocabulary_of(tokenizer), 3).save(folder / "store")
    return folder
