"""What `Decoder.from_pretrained` loads: a target by its name, and a drafter for it."""

import logging
from collections.abc import Mapping
from copy import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.heads.base import DraftHead
from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.errors import UserError
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.target.any_target import load_target, target_of
from drafthead.heads.target.loading import load_tokenizer, vocabulary_of
from drafthead.heads.target.target import Target
from drafthead.infer.drafters.earlier import Earlier
from drafthead.infer.drafters.prompt_lookup import PromptLookup
from drafthead.infer.drafters.store_lookup import StoreLookup, load_stored
from drafthead.infer.drafters.with_lookup import WithLookup
from drafthead.infer.engine.compiled_target import CompiledTarget

logger = logging.getLogger(__name__)

DEFAULT_CHAIN = 4  # tokens that a draft model, own layers or prompt lookup draft


def refuse_other_names(names: Mapping[str, object]) -> None:
    """Raise UserError for an argument that is neither None nor a path or name."""
    for name, value in names.items():
        if not isinstance(value, str | Path | None):
            raise UserError(f"{name} must be a path or a name, got {value!r}")


def refuse_several(models: Mapping[str, str | Path | None]) -> None:
    """Raise UserError for more than one of the drafters that are models."""
    if len([name for name in models.values() if name is not None]) > 1:
        *others, last = models
        raise UserError(
            f"choose one of {', '.join(others)} and {last}; prompt_lookup goes with each"
        )


def length_of_paths(draft_tokens: int | None, is_used: bool) -> int:
    """The most tokens on a path; raises UserError for a number that no drafter uses."""
    if draft_tokens is None:
        return DEFAULT_CHAIN
    if not is_used:
        raise UserError(
            "draft_tokens is for draft_model, draft_layers and prompt_lookup: trees of a head or a "
            "datastore are sized by tree_nodes"
        )
    return draft_tokens


def loaded_target(
    target: str | Path | PreTrainedModel | Target,
    dtype: str,
    device: str,
    trust_code: bool,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
) -> Target:
    """The target of this name, or the one that is loaded already; with a tokenizer if one is given.

    Raises UserError for a dtype or a device for a loaded one, which keeps its own, and for what is
    no model or no tokenizer.
    """
    if isinstance(target, str | Path):
        loaded = load_target(target, dtype, device, trust_code)
        return with_tokenizer(loaded, tokenizer, trust_code)
    if not isinstance(target, Target | torch.nn.Module):
        raise UserError(
            f"a target is the name of a model, a loaded one or a Target, got {target!r}"
        )
    for name, value in (("dtype", dtype), ("device", device)):
        if value != "auto":
            raise UserError(f"{name}={value} is for models that are loaded by name: leave it out")
    loaded = target if isinstance(target, Target) else target_of(target)
    return with_tokenizer(loaded, tokenizer, trust_code)


def with_tokenizer(
    target: Target, tokenizer: str | Path | PreTrainedTokenizerBase | None, trust_code: bool
) -> Target:
    """The target with a tokenizer, loaded or by name; as it is for None.

    Raises UserError for what is no tokenizer.
    """
    if tokenizer is None:
        return target
    found: object = tokenizer
    if isinstance(tokenizer, str | Path):
        try:
            found = load_tokenizer(tokenizer, str(tokenizer), trust_code)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"cannot load the tokenizer {tokenizer}: {reason}") from error
    elif not isinstance(tokenizer, PreTrainedTokenizerBase):
        found = getattr(tokenizer, "tokenizer", None)  # of a processor
    if not isinstance(found, PreTrainedTokenizerBase):
        raise UserError(f"tokenizer must be one of transformers or its name, got {tokenizer!r}")
    target = copy(target)
    target.tokenizer = found
    return target


def described(target: Target, drafter: Drafter | None) -> str:
    """What decodes, in a few words."""
    names = [type(part).__name__ for part in (target.model, drafter) if part is not None]
    how = ", compiled" if isinstance(target, CompiledTarget) else ""
    plain = "" if drafter is not None else ", no drafter"
    return f"{', '.join(names)}{plain}, {target.precision} on {target.device}{how}"


def store_lookup(
    folder: str | Path | None, learn_answers: bool, target: Target
) -> StoreLookup | None:
    """Lookup in the datastore of a folder and in the process's own answers; None without either.

    Raises UserError when the folder holds no datastore of this target's tokens.
    """
    if folder is None and not learn_answers:
        return None
    store = None
    if folder is not None:
        if target.tokenizer is None:
            raise UserError("a datastore needs the target's tokenizer: load the target by its name")
        store = load_stored(Path(folder), vocabulary_of(target.tokenizer))
    return StoreLookup(store, Earlier() if learn_answers else None)


def lookup_drafter(drafter: Drafter | None, stored: StoreLookup | None, depth: int) -> Drafter:
    """Lookup beside a drafter, or alone: in what is stored, or in the own past to a depth."""
    if drafter is not None:
        return WithLookup(drafter, stored)
    return PromptLookup(depth) if stored is None else stored


def head_drafter(head: DraftHead, target: Target) -> Drafter:
    """The head with trees of its own choice; with a warning, if it was never measured."""
    if not head.path_counts:
        instead = "the published tree of its family" if head.usual_paths else "a chain"
        logger.warning("the head has no measured acceptance: it drafts %s", instead)
    return drafter_for(head, target)
