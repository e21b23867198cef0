"""The drafter for a draft model: by whose tokenizer it has, and which tokens it guesses among."""

from pathlib import Path

from drafthead.heads.target.any_target import load_target
from drafthead.heads.target.target import Target
from drafthead.infer.drafters.draft_model import DraftModel, same_tokenizer
from drafthead.infer.drafters.frequent_tokens import FrequentTokens, read_draft_vocabulary
from drafthead.infer.drafters.other_vocabulary import OtherVocabulary


def load_draft_model(
    name: str | Path, target: Target, dtype: str = "auto", trust_code: bool = False
) -> Target:
    """A draft model for a target, on its device.

    `dtype` is as for `Target.from_pretrained`, but `auto` is the target's type: a draft model that
    computes in another one may be many times slower, and what is accepted is the target's choice.
    """
    own = str(target.dtype).removeprefix("torch.") if dtype == "auto" else dtype
    return load_target(name, own, str(target.device), trust_code)


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
