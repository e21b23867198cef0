"""Loading a head from a checkpoint of any known format."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from drafthead.core.errors import UserError, first_line
from drafthead.core.printing import one_sentence, shown
from drafthead.core.target.target import Target
from drafthead.core.target.weight_types import LOSSY
from drafthead.core.target.weights_hash import weights_fingerprint
from drafthead.heads.base import DraftHead, head_family
from drafthead.heads.formats.base import FORMATS, Foreign, Format, TargetFacts
from drafthead.heads.formats.checkpoint import Checkpoint, checkpoints_at
from drafthead.heads.formats.drafthead import check_head_config

logger = logging.getLogger(__name__)

# Copies of the target's weights may be rounded to 16 bits: the difference relative to the norm.
ROUNDING = 0.01


@one_sentence()
def recognised(path: Path) -> tuple[Format, Checkpoint]:
    """The format of a checkpoint, judged by its content, and the opened checkpoint.

    Raises UserError when there is none, when it is damaged, or when its format is not known.
    """
    problem: UserError | None = None
    is_model = False
    for checkpoint in checkpoints_at(path):
        is_model |= is_language_model(checkpoint)
        try:
            for known in FORMATS.values():
                if known.recognises(checkpoint):
                    checkpoint.tensors  # noqa: B018  (opened, so that damage shows here)
                    return known, checkpoint
        except UserError as error:
            problem = problem or error
    hint = " (its configuration is a language model's: is it a draft model?)" if is_model else ""
    raise problem or UserError(
        f"{path} holds no draft head of a known format; known formats: {', '.join(FORMATS)}{hint}"
    )


def is_language_model(checkpoint: Checkpoint) -> bool:
    """Tell whether a configuration names a class of transformers that predicts tokens."""
    named = checkpoint.config.get("architectures")
    return isinstance(named, list) and any(str(name).endswith("ForCausalLM") for name in named)


@one_sentence()
def read_foreign(path: Path, target: TargetFacts) -> tuple[Format, Foreign]:
    """The format and the head of the checkpoint at `path`.

    Raises UserError as `recognised` does, when the head is not understood, when its configuration
    has keys that are not known or is out of bounds, and when a tensor holds values that are not
    finite.
    """
    known, checkpoint = recognised(path)
    try:
        foreign = known.read(checkpoint, target)
        checkpoint.account.refuse_unknown(checkpoint.config, checkpoint.config_file, known.name)
        check_head_config(foreign.config, checkpoint.config_file)
    except UserError:
        raise
    except ValueError as error:  # of a head's configuration, which checks itself
        raise UserError(f"{path} does not describe a head: {error}") from error
    for name, tensor in foreign.tensors.items():
        # Beyond float32 a value becomes infinite as soon as it is used.
        wide = tensor.dtype == torch.float64
        if not torch.isfinite(tensor.float() if wide else tensor).all():
            raise UserError(f"{checkpoint.weights}: {name} holds values that are not finite")
    return known, foreign


@one_sentence()
def build_head(foreign: Foreign, path: Path, target: Target | None = None) -> DraftHead:
    """A head with the tensors of `foreign`, in their types and on the CPU.

    `path` is named in errors. A target fills in open sizes, and the head must fit it. Raises
    UserError when it does not, when a target is needed and missing, or when names, shapes, types or
    values of tensors are wrong.
    """
    if target is None and foreign.needs_target:
        raise UserError(
            f"{path} does not say {foreign.needs_target}: name the target it was made for"
        )
    family = head_family(foreign.family)
    if target is not None:
        check_target(path, foreign.target, target)
    foreign = settled(path, foreign, target)
    config = foreign.config
    try:
        if target is not None:
            config = family.sized(config, target)
        with torch.device("meta"):  # sizes are compared before anything is allocated
            head = family(config)
    except Exception as error:  # a wrong configuration can fail in any way
        raise UserError(
            f"the configuration of {path} does not describe a head: {first_line(error)}"
        ) from error
    check_tensors(head, foreign.tensors, path)
    head.load_state_dict(foreign.tensors, assign=True)
    head.path_counts = foreign.path_counts
    return head.eval().requires_grad_(False)


def load_head(path: Path, target: Target) -> DraftHead:
    """Read a head of any known format for `target`, in its type and on its device.

    Raises UserError with the file and the value when a file is missing or damaged, the format or
    the family is unknown, or the head was trained for another kind of target. Warns where it was
    trained for other weights.
    """
    target.refuse_encoder("a draft head")
    _, foreign = read_foreign(path, TargetFacts.of(target))
    head = build_head(foreign, path, target).to(target.device, target.dtype)
    learnt = foreign.provenance.get("target_weights")
    if learnt and target.precision not in LOSSY and learnt != weights_fingerprint(target):
        logger.warning(
            "%s was trained for %s, and this target has other weights: acceptance may be low; "
            "`drafthead build --target MODEL --init-from %s --output DIR --minutes 30` adapts it",
            path,
            foreign.target.name or "another target",
            path,
        )
    return head


def check_target(path: Path, made_for: TargetFacts, target: Target) -> None:
    """Raise UserError when known facts about the head's target are not true of `target`."""
    for name in ("hidden_size", "vocab_size", "num_layers"):
        expected, found = getattr(made_for, name), getattr(target, name)
        if expected is not None and expected != found:
            raise UserError(
                f"the head in {path} was trained for {made_for.name or 'a target'} with "
                f"{name} {expected}, but this target has {name} {found}"
            )


def settled(path: Path, foreign: Foreign, target: Target | None) -> Foreign:
    """`foreign` after comparing its copies of the target's weights; equal copies are dropped.

    An embedding that differs, or cannot be compared, becomes the head's own if its family can have
    one. Raises UserError for any other copy that differs by more than rounding.
    """
    for name, copy in foreign.copies.items():
        weight: torch.Tensor | None = None
        if target is not None:
            own = target.output_weight() if name == "output" else target.input_weight()
            weight = own.detach().cpu()
        if weight is not None and equal(weight, copy):
            continue
        distance = 0.0 if weight is None else difference(weight, copy)
        if name == "embedding" and hasattr(foreign.config, "embeddings"):
            if not distance <= ROUNDING:
                logger.warning(
                    "%s has another embedding than the target: is it for another target?", path
                )
            config = replace(foreign.config, embeddings="own")
            tensors = {**foreign.tensors, "embed_tokens.weight": copy}
            foreign = replace(foreign, config=config, tensors=tensors)
        elif not distance <= ROUNDING:
            raise UserError(
                f"{path} holds an {name} that differs from the target's: it was trained for "
                "another target"
            )
    return replace(foreign, copies={})


def equal(weight: torch.Tensor, copy: torch.Tensor) -> bool:
    """Tell whether a copy [V, D] equals a weight [V, D], perhaps in a type that loses nothing."""
    return torch.equal(copy.to(weight.dtype), weight) and torch.equal(weight.to(copy.dtype), copy)


def difference(weight: torch.Tensor, copy: torch.Tensor) -> float:
    """Return how far a copy [V, D] is from a weight [V, D], relative to its norm."""
    if weight.shape != copy.shape:
        return float("inf")
    return float((weight.float() - copy.float()).norm() / weight.float().norm())


def check_tensors(head: DraftHead, tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Raise UserError unless `tensors` [...] are exactly those of the head and as shaped."""
    expected = head.state_dict()
    if missing := sorted(set(expected) - set(tensors)):
        raise UserError(f"{path} lacks {len(missing)} tensors, the first is {missing[0]}")
    if extra := sorted(set(tensors) - set(expected)):
        raise UserError(f"{path} holds {len(extra)} unknown tensors, the first is {extra[0]}")
    for name, tensor in tensors.items():
        wanted = expected[name]
        if tensor.shape != wanted.shape:
            raise UserError(
                f"{path}: {name} has shape {shown(list(tensor.shape))}, "
                f"its configuration says {list(wanted.shape)}"
            )
        same_kind = tensor.is_floating_point() == wanted.is_floating_point()
        if not same_kind or not (tensor.is_floating_point() or tensor.dtype == wanted.dtype):
            raise UserError(f"{path}: {name} is {tensor.dtype}, but must be {wanted.dtype}")
