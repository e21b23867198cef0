"""Draft models that guess among frequent tokens only.

The output head is most of what a pass of a small model reads, and most tokens of a vocabulary are
rare (FR-Spec, Zhao et al., 2025, arXiv 2502.14856). What is accepted stays the target's choice, so
a token outside the list is only never drafted.
"""

from pathlib import Path

import torch
from torch import nn

from drafthead.core.errors import UserError
from drafthead.core.target.architecture import with_own_children
from drafthead.core.target.target import Target
from drafthead.heads.formats.files import read_json
from drafthead.infer.drafters.draft_model import DraftModel

DRAFT_IDS_FILE, DRAFT_IDS = "draft_ids.json", "draft_ids"  # beside the model; its only key


class FrequentTokens(DraftModel):
    """Chains and trees of up to `depth` levels from a model whose output head has few rows."""

    def __init__(self, model: Target, target: Target, depth: int, tokens: torch.Tensor):
        """`model` guesses among `tokens` [Vd]. Raises UserError where `DraftModel` does, or when
        its output head is no plain matrix.
        """
        self.tokens = tokens.to(model.device)
        super().__init__(with_rows(model, self.tokens), target, depth)

    def proposable(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def target_ids(self, places: torch.Tensor) -> torch.Tensor:
        return self.tokens[places]

    def __repr__(self) -> str:
        return f"{super().__repr__()} with {len(self.tokens)} frequent tokens"


def with_rows(model: Target, tokens: torch.Tensor) -> Target:
    """The model with only those rows of its output head that belong to `tokens` [Vd].

    It shares all other weights. Raises UserError when the output head is no plain matrix.
    """
    head = model.output_head
    if type(head) is not nn.Linear:
        raise UserError(
            f"a draft vocabulary needs a draft model with a plain output head, not "
            f"{type(head).__name__}"
        )
    few = nn.Linear(head.in_features, len(tokens), head.bias is not None, device="meta")
    few.weight = nn.Parameter(head.weight[tokens])
    if head.bias is not None:
        few.bias = nn.Parameter(head.bias[tokens])
    # A copy of the outermost module alone, so that the given model keeps its output head.
    other = with_own_children(model.model)
    other.set_output_embeddings(few)
    return Target(other, model.tokenizer)


def read_draft_vocabulary(model: Target) -> torch.Tensor | None:
    """The frequent tokens [Vd] that the folder of a draft model names; None where it names none.

    Raises UserError for a file that is not a list of different tokens in ascending order.
    """
    path = Path(model.model.name_or_path) / DRAFT_IDS_FILE
    if not model.model.name_or_path or not path.exists():
        return None
    tokens, most = read_json(path).get(DRAFT_IDS), model.vocab_size - 1
    plain = isinstance(tokens, list) and all(type(token) is int for token in tokens)
    if plain and tokens and tokens == sorted({*tokens}) and 0 <= tokens[0] <= tokens[-1] <= most:
        return torch.tensor(tokens)
    raise UserError(
        f"{path} must list under {DRAFT_IDS!r} token ids from 0 to {most}, in ascending order and "
        "each once"
    )
