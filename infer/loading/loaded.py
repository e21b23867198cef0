"""Targets and drafters by their names, as `Decoder.from_pretrained` loads them.

A drafter is named `KIND:ARGUMENT` (`DRAFTERS` has the kinds), by a kind that needs no argument, or
by the path alone of a head, a draft model or a table of n-grams.
"""

import logging
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.core.drafting.drafter import Drafter
from drafthead.core.errors import UserError, first_line
from drafthead.core.registry import Registry
from drafthead.core.storage.files import plain_path
from drafthead.core.storage.names import (
    FETCHED_MODELS,
    SHIPPED_HEADS,
    may_be_hub_id,
    suggestion,
)
from drafthead.core.target.adapters import base_of_adapter
from drafthead.core.target.any_target import load_target, target_of
from drafthead.core.target.gguf_files import gguf_file, is_fetched_name
from drafthead.core.target.loading import configuration_of, load_tokenizer, vocabulary_of
from drafthead.core.target.one_width import OneWidthTarget
from drafthead.core.target.processor import instructions, tell_of_slow_bfloat16
from drafthead.core.target.target import Target
from drafthead.heads.base import DraftHead
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.formats import load_head, recognised
from drafthead.heads.formats.checkpoint import local_copy
from drafthead.infer.drafters.lookup import Lookup, PromptLookup
from drafthead.infer.drafters.model_drafter import load_draft_model, model_drafter
from drafthead.infer.drafters.ngram_table import RECORD
from drafthead.infer.drafters.store_lookup import Earlier, StoreLookup, load_table
from drafthead.infer.drafters.with_lookup import WithLookup
from drafthead.infer.request.values import is_list

logger = logging.getLogger(__name__)

PATHS = ("PATH", "FOLDER")  # arguments of kinds that are files
DEFAULT_CHAIN = 4  # tokens that a draft model, own layers or prompt lookup draft


@dataclass(frozen=True)
class Fitting:
    """The target that a drafter is made for, and the options."""

    target: Target
    length: int = DEFAULT_CHAIN  # most tokens on a path, of drafters that have no better measure
    dtype: str = "auto"
    trust_code: bool = False


Maker: TypeAlias = Callable[[str, Fitting], Drafter]


@dataclass(frozen=True)
class DraftKind:
    """A kind of drafter that `draft` can name."""

    make: Maker
    argument: str  # what follows its name and a colon; empty: nothing
    beside: bool  # whether it goes beside another drafter
    has_length: bool  # whether `draft_tokens` limits its paths, where it is not beside another


DRAFTERS = Registry[DraftKind]({"layers": "drafthead.contrib.own_layers"})


def register_drafter(
    name: str, argument: str = "", *, beside: bool = False, has_length: bool = False
) -> Callable[[Maker], Maker]:
    """Register what makes a kind of drafter, see `DraftKind`; ValueError when the name is taken.

    It is called with what follows the name and a colon, and raises UserError for what it cannot
    make a drafter of.
    """

    def register(make: Maker) -> Maker:
        DRAFTERS.register(name, DraftKind(make, argument, beside, has_length), "drafters")
        return make

    return register


@dataclass(frozen=True)
class NamedDraft:
    """A drafter by its kind and what it is made of."""

    name: str
    argument: str = ""

    def __str__(self) -> str:
        return f"{self.name}:{self.argument}" if self.argument else self.name

    @property
    def kind(self) -> DraftKind:
        """Its entry in the registry."""
        return DRAFTERS[self.name]

    def made(self, fitting: Fitting) -> Drafter:
        """The drafter, which requests can choose by its kind."""
        drafter = self.kind.make(self.argument, fitting)
        drafter.names = (self.name,)
        return drafter


Draft: TypeAlias = str | Path | Drafter  # what `draft` takes, or a list of


def read_drafts(draft: Draft | Sequence[Draft] | None) -> list[NamedDraft | Drafter]:
    """Parse `draft`, before anything is loaded.

    Raises UserError for a value that is not a name, a path or a Drafter, for a path without a
    drafter, for two drafters of which neither is a lookup, and for the same kind twice.
    """
    given = draft if is_list(draft) else [] if draft is None else [draft]
    drafts = [each if isinstance(each, Drafter) else named_draft(each) for each in given]
    alone = [str(each) for each in drafts if not is_beside(each)]
    if len(alone) > 1:
        beside = [name for name in DRAFTERS if DRAFTERS[name].beside]
        raise UserError(
            f"choose one of {' and '.join(alone)} to draft: only {', '.join(beside)} can be added "
            "to it"
        )
    names = [each.name for each in drafts if isinstance(each, NamedDraft)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{twice[0]} is given twice as a drafter: remove one")
    return drafts


def is_beside(draft: NamedDraft | Drafter) -> bool:
    """Whether a drafter can be added to another one: it is a kind of lookup."""
    return draft.kind.beside if isinstance(draft, NamedDraft) else isinstance(draft, Lookup)


def path_of(given: str) -> Path | None:
    """The path that names a drafter, alone or after its kind; None for one without a path."""
    name, colon, argument = given.partition(":")
    if name in DRAFTERS and (colon or not DRAFTERS[name].argument):
        return Path(argument) if DRAFTERS[name].argument in PATHS else None
    return None if given in SHIPPED_HEADS else Path(given)


def named_draft(given: object) -> NamedDraft:
    """The draft that a name, `KIND:ARGUMENT` or a path means; raises UserError as `read_drafts`."""
    if not isinstance(given, str | Path):
        raise UserError(
            f"draft must be a name, a path, a Drafter or a list of these, got {given!r}: names "
            f"are {kinds_listed()}"
        )
    name, colon, argument = str(given).partition(":")
    if isinstance(given, str) and name in DRAFTERS and (colon or not DRAFTERS[name].argument):
        if bool(argument) != bool(DRAFTERS[name].argument):
            raise UserError(f"{given!r} is not a drafter: choose one of {kinds_listed()}")
        if (path := path_of(given)) is not None:
            plain_path(path)
        return NamedDraft(name, argument)
    return NamedDraft(kind_of_path(Path(given)), str(given))


def kinds_listed() -> str:
    """The names of all kinds of drafters, with what follows them."""
    listed = [":".join(filter(None, (name, DRAFTERS[name].argument))) for name in DRAFTERS]
    return ", ".join([*listed, *SHIPPED_HEADS])


def kind_of_path(path: Path) -> str:
    """The kind of drafter at a path or hub name: `ngrams`, `model` or `head`.

    Raises UserError, with the names that `draft` takes, for anything else.
    """
    if (plain_path(path) / RECORD).is_file():
        return "ngrams"
    if is_fetched_name(path) or gguf_file(path) is not None:
        return "model"
    try:
        known, checkpoint = recognised(path)
    except UserError as error:
        folder = local_copy(path) if path.exists() or may_be_hub_id(path) else None
        # An adapter of PEFT has no configuration of a model: it names the model that has.
        if (
            folder is not None
            and folder.is_dir()
            and (base_of_adapter(folder) or configuration_of(folder, trust_code=False))
        ):
            return "model"
        reason = f"{error} (it is not a model either; --draft takes {kinds_listed()})"
        near = suggestion(str(path), [*DRAFTERS, *SHIPPED_HEADS, *FETCHED_MODELS])
        if near and len(path.parts) == 1 and not path.exists():
            reason = f"{path} does not exist{near}"
        raise UserError(reason) from error
    # A whole model that has an MTP layer drafts as a model: `mtp` is the layer of the target.
    is_whole = known.name == "mtp" and "embed_tokens.weight" in checkpoint.tensors
    return "model" if is_whole else "head"


def length_of_paths(draft_tokens: int | None, drafts: Sequence[NamedDraft | Drafter]) -> int:
    """The most tokens on a path; raises UserError for a number that no drafter uses."""
    if draft_tokens is None:
        return DEFAULT_CHAIN
    kinds = [each.kind for each in drafts if isinstance(each, NamedDraft)]
    if not any(kind.has_length and (len(drafts) == 1 or not kind.beside) for kind in kinds):
        raise UserError(
            "draft_tokens is for draft models, own layers and lookup alone: trees of a head or of "
            "n-grams are sized by tree_nodes"
        )
    return draft_tokens


def made_drafter(drafts: Sequence[NamedDraft | Drafter], fitting: Fitting) -> Drafter | None:
    """The drafter that `read_drafts` has found, with all lookup beside it; None for no drafter."""
    made = [each.made(fitting) if isinstance(each, NamedDraft) else each for each in drafts]
    drafter = next((each for each in made if not isinstance(each, Lookup)), None)
    lookups = [each for each in made if isinstance(each, Lookup)]
    if not lookups:
        return drafter
    kept = [each for each in lookups if isinstance(each, StoreLookup)]
    table = next((each.table for each in kept if each.table is not None), None)
    earlier = next((each.earlier for each in kept if each.earlier is not None), None)
    lookup = StoreLookup(table, earlier) if len(kept) > 1 else kept[0] if kept else None
    names = tuple(name for each in lookups for name in each.names)
    if lookup is not None:
        lookup.names = names
    return (lookup or lookups[0]) if drafter is None else WithLookup(drafter, lookup)


@register_drafter("head", "PATH")
def named_head(path: str, fitting: Fitting) -> Drafter:
    """The draft head of a folder, file or hub name, of any known format."""
    return head_drafter(load_head(Path(path), fitting.target), fitting.target)


@register_drafter("mtp")
def named_mtp(_argument: str, fitting: Fitting) -> Drafter:
    """The layer for drafting that the target brings along, from the target's own files."""
    name = fitting.target.model.name_or_path
    if not name:
        raise UserError("draft mtp is read from the target's files: load the target by its name")
    try:
        return named_head(name, fitting)
    except UserError as error:
        raise UserError(f"draft mtp is the target's own MTP layer: {error}") from error


@register_drafter("model", "PATH", has_length=True)
def named_model(name: str, fitting: Fitting) -> Drafter:
    """The draft model of a folder, GGUF file or hub name, with any tokenizer."""
    model = load_draft_model(name, fitting.target, fitting.dtype, fitting.trust_code)
    return model_drafter(model, fitting.target, fitting.length)


@register_drafter("lookup", beside=True, has_length=True)
def named_lookup(_argument: str, fitting: Fitting) -> Drafter:
    """Lookup in the prompt and the answer so far."""
    return PromptLookup(fitting.length)


@register_drafter("ngrams", "FOLDER", beside=True)
def named_ngrams(folder: str, fitting: Fitting) -> Drafter:
    """Lookup also in what `drafthead data index` has written into a folder."""
    return store_lookup(Path(folder), fitting.target)


@register_drafter("answers", beside=True)
def named_answers(_argument: str, _fitting: Fitting) -> Drafter:
    """Lookup also in what this process has read and written."""
    return StoreLookup(None, Earlier())


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
            reason = first_line(error)
            raise UserError(f"cannot load the tokenizer {tokenizer}: {reason}") from error
    elif not isinstance(tokenizer, PreTrainedTokenizerBase):
        found = getattr(tokenizer, "tokenizer", None)  # of a processor
    if not isinstance(found, PreTrainedTokenizerBase):
        raise UserError(f"tokenizer must be one of transformers or its name, got {tokenizer!r}")
    target = copy(target)
    target.tokenizer = found
    return target


def described(target: Target, drafter: Drafter | None) -> str:
    """A target and a drafter in a few words."""
    names = [type(part).__name__ for part in (target.model, drafter) if part is not None]
    how = f", kernels for {instructions()}" if target.backend.has_kernels else ""
    how = ", recorded" if target.backend.records else how
    plain = "" if drafter is not None else ", no drafter"
    return f"{', '.join(names)}{plain}, {target.precision} on {target.device}{how}"


def store_lookup(folder: Path, target: Target) -> StoreLookup:
    """Lookup in what `drafthead data index` has written into a folder.

    Raises UserError when it holds nothing of this target's tokens.
    """
    if target.tokenizer is None:
        raise UserError(
            "a table of n-grams needs the target's tokenizer: load the target by its name"
        )
    return StoreLookup(load_table(folder, vocabulary_of(target.tokenizer)))


def head_drafter(head: DraftHead, target: Target) -> Drafter:
    """The head with trees of its own choice; with a warning, if it was never measured."""
    if not head.path_counts:
        instead = "the published tree of its family" if head.usual_paths else "a chain"
        logger.warning(
            "the head drafts %s until head evaluate --save-acceptance has measured it",
            instead,
        )
    return drafter_for(head, target)


def prepared_target(target: Target, compile: bool | None, same_bits: bool = False) -> Target:
    """The target as it decodes: on a GPU recorded, with `compile` of compiled layers; on a CPU with
    our kernels, where there are any for it; for False as it is.

    With `same_bits` passes are of one width, where that is needed, and not recorded. Raises
    UserError for `compile` where the target cannot be compiled, and for `same_bits` where it cannot
    hold.
    """
    if compile:
        target.refuse_encoder("compile")
    if compile and not is_recorded_on(target.device):
        tell_of_nothing_to_compile()
        compile = None
    is_new = not target.backend.records
    if compile:
        target.check_compilable()
    if is_new and (compile or (compile is None and not same_bits and can_record(target))):
        target = target.recorded(fuses=bool(compile))
    elif compile is None and is_new:
        target = target.packed()
    if same_bits and not target.same_bits:
        target = OneWidthTarget(target)
    if not (target.backend.records or target.backend.has_kernels):
        tell_of_slow_bfloat16(target.device, target.dtype)
    if target.dtype.itemsize == 2 and not target.same_bits:
        tell_of_near_ties(type(target.model).__name__, target.precision)
    return target


def can_record(target: Target) -> bool:
    """Whether passes of a target are recorded by default: on a GPU, where that works."""
    if not is_recorded_on(target.device) or target.has_encoder:
        return False
    try:
        target.check_compilable()
    except UserError as reason:
        logger.info("passes do not use CUDA graphs: %s", reason)
        return False
    return True


def is_recorded_on(device: torch.device) -> bool:
    """Whether passes on a device can be recorded, and their layers compiled."""
    return device.type == "cuda"


@cache
def tell_of_nothing_to_compile() -> None:
    """Say, once in a process, that an option changes nothing on a CPU."""
    logger.warning("compile changes nothing on a CPU: it is for GPUs, whose layers it compiles")


@cache
def tell_of_near_ties(model: str, precision: str) -> None:
    """Say, once for each kind of model, that its bits depend on how a text is read."""
    logger.info(
        "%s in %s without our CPU kernels: greedy answers can differ from plain decoding where two "
        "tokens are nearly tied; --same-bits or --dtype float32 gives identical text",
        model,
        precision,
    )
