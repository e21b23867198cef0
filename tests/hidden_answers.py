"""A drafter that knows the right answer and hides it among wrong siblings and cousins.

So each node on the right path must be scored as plain decoding scores it, or nothing is accepted.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tiny import VOCAB
from transformers.modeling_utils import PreTrainedModel

from drafthead.core.drafting.drafter import Committed, Drafter, DraftSession
from drafthead.core.sampling import RowRandom, SamplingConfig
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget, TokenTree, TreeShape
from drafthead.infer import Decoder


def generated(model: PreTrainedModel, prompt: list[int], new: int, **options: Any) -> list[int]:
    """What transformers' own greedy decoding answers; of an encoder-decoder model, to a source."""
    ids = torch.tensor([prompt])
    begun = len(prompt)
    if model.config.is_encoder_decoder:
        begun = 1 if model.generation_config.forced_bos_token_id is None else 2
        new += begun - 1  # transformers counts the forced token
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new,
        **options,
    )
    return output[0, begun:].tolist()


class Oracle(Drafter):
    """Proposes the true continuation of each prompt at the nodes `right` of a tree."""

    features = FeatureSpec(layers=(), last=False)

    def __init__(self, shape: TreeShape, right: Sequence[int], texts: Sequence[Sequence[int]]):
        self.shape, self.right, self.texts = shape, list(right), texts
        self.budgets = (shape.budget,)

    def start(self, prompts: torch.Tensor, lengths: torch.Tensor) -> DraftSession:
        """A session that finds each prompt's text by its beginning."""
        rows = [p[:n] for p, n in zip(prompts.tolist(), lengths.tolist(), strict=True)]
        texts = [next(t for t in self.texts if t[: len(row)] == row) for row in rows]
        return OracleSession(self, texts)


class OracleSession(DraftSession):
    """Knows how far each row is."""

    def __init__(self, oracle: Oracle, texts: list[Sequence[int]]):
        self.oracle, self.texts, self.done = oracle, texts, [0] * len(texts)

    def commit(self, committed: Committed) -> None:
        """Count the committed positions."""
        pairs = zip(self.done, committed.lengths.tolist(), strict=True)
        self.done = [done + new for done, new in pairs]

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop the other rows."""
        self.texts = [self.texts[row] for row in rows.tolist()]
        self.done = [self.done[row] for row in rows.tolist()]

    def propose(
        self, budget: Budget, sampling: SamplingConfig, random: RowRandom | None
    ) -> TokenTree:
        """The right tokens at the right nodes; elsewhere those that its siblings leave over."""
        shape, right = self.oracle.shape, self.oracle.right
        depths, ranks = shape.depths.tolist(), shape.ranks.tolist()
        rows = []
        for text, done in zip(self.texts, self.done, strict=True):
            row = [(text[done + d] + r + 1) % VOCAB for d, r in zip(depths, ranks, strict=True)]
            for depth, node in enumerate([0, *right]):
                row[node] = text[done + depth]
            rows.append(row)
        return TokenTree.from_shape(shape, torch.tensor(rows))


CHAIN = TreeShape.chain(3)
# The right path goes by the second children, so that nodes stand further on than they are deep.
TREE = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)])


def check_every_right_token_is_accepted(
    target: Target, prompts: Sequence[list[int]], new: int
) -> None:
    """Plain decoding, chains and trees answer as transformers does, one by one and together."""
    answers = [generated(target.model, prompt, new + 4) for prompt in prompts]
    assert len({token for answer in answers for token in answer}) > 3, "monotony tests little"
    pairs = zip(prompts, answers, strict=True)
    texts = [target.as_prompt(prompt) + answer for prompt, answer in pairs]
    drafters = [None, Oracle(CHAIN, [1, 2, 3], texts), Oracle(TREE, [2, 5, 6], texts)]
    for drafter in drafters:
        decoder = Decoder(target, drafter)
        for batch in (1, len(prompts)):
            for start in range(0, len(prompts), batch):
                result = decoder.generate(prompts[start : start + batch], max_new_tokens=new)
                wanted = [answer[:new] for answer in answers[start : start + batch]]
                assert result.sequences == wanted
                accepted = {n for row in result.stats.accept_lengths for n in row}
                assert accepted == ({1} if drafter is None else {4}), "right tokens were rejected"
