"""Lookup as vLLM asks for it: by rows of a batch whose requests come, go and move."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny import byte_tokenizer

from drafthead.core.errors import UserError
from drafthead.core.target.loading import vocabulary_of
from drafthead.infer.drafters.ngram_table import NgramTable
from drafthead.lab.servers.vllm_lookup import FOLDER, LookupProposer

LONGEST = 24


def proposer(folder: Path, vocabulary: str) -> LookupProposer:
    """One with a table of a text, drafting up to 4 tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    text = tokenizer.encode("abcdefg" * 3, add_special_tokens=False)
    NgramTable.of([text], vocabulary, 3).save(folder)
    return LookupProposer(
        SimpleNamespace(
            model_config=SimpleNamespace(tokenizer=str(folder), max_model_len=LONGEST),
            speculative_config=SimpleNamespace(num_speculative_tokens=4),
            additional_config={FOLDER: str(folder)},
        )
    )


def test_rows_are_drafted_for_as_vllm_asks(tmp_path: Path) -> None:
    asked, tokenizer = proposer(tmp_path, vocabulary_of(byte_tokenizer())), byte_tokenizer()

    def drafts(*rows: str | None) -> list[str]:
        """After rows of text, of which the last token is new; None: a prompt is still read."""
        tokens, lengths = np.zeros((len(rows), LONGEST), dtype=np.int32), np.ones(len(rows), int)
        for row, text in enumerate(rows):
            ids = tokenizer.encode(text or "?", add_special_tokens=False)
            tokens[row, : len(ids)], lengths[row] = ids, len(ids)
        found = asked.propose([[1] if text else [] for text in rows], lengths, tokens)
        return [tokenizer.decode(ids) for ids in found]

    asked.load_model(object())
    assert drafts("xabc", None, "uvwxyz, uvw") == ["defg", "", "xyz,"], "by the table, by the past"
    kept = asked.histories[0][0]
    assert drafts("xabcd", "uvwxyz, uvwx")[1] == "yz, ", "a request has moved"
    assert drafts("xabcdefg") == ["abcd"] and asked.histories[0][0] is kept
    assert drafts("x" * (LONGEST - 6) + "abc") == ["de"], "no more than there is room for"
    assert drafts("x" * (LONGEST - 1)) == [""]


def test_no_table_and_one_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name its folder as drafthead_ngrams"):
        LookupProposer(SimpleNamespace(model_config=None, additional_config={}))
    with pytest.raises(UserError, match="another tokenizer"):
        proposer(tmp_path, "other")
