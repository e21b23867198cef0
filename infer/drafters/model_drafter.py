"""The drafter for a draft model: by whose tokenizer it has, and which tokens it guesses among."""

from drafthead.heads.target.target import Target
from drafthead.infer.drafters.draft_model import DraftModel, same_tokenizer
from drafthead.infer.drafters.frequent_tokens import FrequentTokens, read_draft_vocabulary
from drafthead.infer.drafters.other_vocabulary import OtherVocabulary


def model_drafter(model: Target, target: Target, depth: int) -> DraftModel:
    """A drafter of up to `depth` levels for a draft model with the target's tokenizer or another.

    One that `drafthead train` made may name the tokens that it guesses among.
    """
    if not same_tokenizer(target, model):
        return OtherVocabulary(model, target, depth)
    tokens = read_draft_vocabulary(model)
    if tokens is None:
        return DraftModel(model, target, depth)
    return FrequentTokens(model, target, depth, tokens)
