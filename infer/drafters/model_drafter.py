"""The drafter for a draft model: by whose tokenizer it has, and which tokens it guesses among."""

from collections.abc import Callable
from pathlib import Path

import torch

from drafthead.core.errors import UserError
from drafthead.core.registry import Registry
from drafthead.core.target.any_target import load_target
from drafthead.core.target.gguf_files import gguf_of
from drafthead.core.target.target import Target
from drafthead.infer.drafters.draft_model import DraftModel, same_tokenizer
from drafthead.infer.drafters.frequent_tokens import FrequentTokens, read_draft_vocabulary

OTHER_TOKENIZER = "other tokenizer"
# What drafts with models that need more than `DraftModel`: (model, target, depth) -> drafter.
MODEL_DRAFTERS: Registry[Callable[[Target, Target, int], DraftModel]] = Registry(
    {OTHER_TOKENIZER: "drafthead.contrib.other_tokenizer.other_tokenizer"}
)


def load_draft_model(
    name: str | Path, target: Target, dtype: str = "auto", trust_code: bool = False
) -> Target:
    """A draft model for a target, on its device.

    `dtype` is as for `load_decoder_only`, but `auto` is the target's type: a draft model that
    computes in another one may be many times slower, and what is accepted is the target's choice.
    """
    own = str(target.dtype).removeprefix("torch.") if dtype == "auto" else dtype
    if dtype == "auto" and target.dtype == torch.bfloat16 and gguf_of(name) is not None:
        own = "auto"  # in its blocks, between which numbers are of that type
    return load_target(name, own, str(target.device), trust_code)


def model_drafter(model: Target, target: Target, depth: int) -> DraftModel:
    """A drafter of up to `depth` levels for a draft model with the target's tokenizer or another.

    One that `drafthead train` made may name the tokens that it guesses among. Raises UserError for
    a depth below 1, for another tokenizer that is implemented in Python, and without a tokenizer
    for a draft model that cannot have the target's.
    """
    if target.tokenizer and not model.tokenizer and model.vocab_size != target.vocab_size:
        raise UserError(
            f"the draft model has no tokenizer that says what its {model.vocab_size} tokens are, "
            f"and the target has {target.vocab_size}: put the files of its tokenizer beside it"
        )
    if not same_tokenizer(target, model):
        return MODEL_DRAFTERS[OTHER_TOKENIZER](model, target, depth)
    tokens = read_draft_vocabulary(model)
    if tokens is None:
        return DraftModel(model, target, depth)
    return FrequentTokens(model, target, depth, tokens[tokens < target.vocab_size])
