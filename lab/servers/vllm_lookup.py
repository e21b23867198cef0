"""Tables of n-grams and lookup inside vLLM, as a proposer of its method `custom_class`.

vLLM 0.32 imports this module itself, so drafthead must be installed beside it:
`--speculative-config '{"method": "custom_class", "model":
"drafthead.lab.servers.vllm_lookup.LookupProposer", "num_speculative_tokens": 4}'` and
`--additional-config '{"drafthead_ngrams": "FOLDER"}'`, as `head export --for vllm` writes them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from drafthead.core.errors import UserError
from drafthead.core.target.loading import vocabulary_of
from drafthead.infer.drafters.history import History
from drafthead.infer.drafters.store_lookup import LookupChains, load_table

FOLDER = "drafthead_ngrams"  # of the table, a key of `--additional-config`


class LookupProposer:
    """The proposer that vLLM asks for drafts after every step, by rows of its batch."""

    def __init__(self, vllm_config: Any):
        """vLLM's settings; raises UserError without a table, and for one of other tokens."""
        model, more = vllm_config.model_config, vllm_config.additional_config
        if FOLDER not in (more or ()):
            raise UserError(f"vLLM needs a table: name its folder as {FOLDER} in additional_config")
        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer)
        folder = Path(more[FOLDER])
        self.lookup = LookupChains(load_table(folder, vocabulary_of(tokenizer)))
        self.most = vllm_config.speculative_config.num_speculative_tokens
        self.longest = model.max_model_len
        # By row, beside the tokens that it was made of: [T]
        self.histories: dict[int, tuple[History, np.ndarray]] = {}

    def load_model(self, *_model: object) -> None:
        """Nothing: vLLM calls it of every proposer."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],  # new ones of each row; none: still reading
        num_tokens_no_spec: np.ndarray,  # [B], the new ones included
        token_ids_cpu: np.ndarray,  # [B, longest]
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """The drafted tokens of each row, as many as there is room for."""
        drafts = []
        for row, new in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            most = min(self.most, self.longest - 1 - length) if new else 0
            past = self.history(row, token_ids_cpu[row, :length]) if most > 0 else None
            drafts.append([] if past is None else self.lookup.guess(past, most, most).tokens)
        return drafts

    def history(self, row: int, tokens: np.ndarray) -> History:
        """The history of a row's tokens [T]: the one of before, unless another request came.

        Only new tokens are looked at one by one.
        """
        past, known = self.histories.get(row, (None, tokens[:0]))
        if past is None or not np.array_equal(known, tokens[: len(known)]):
            past, known = History(int(tokens[0])), tokens[:1]
        for token in tokens[len(known) :].tolist():
            past.append(token)
        self.histories[row] = past, tokens.copy()
        return past
