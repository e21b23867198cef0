"""The interface of checkpoint formats: how files are recognised, read, written and checked.

A format is one class in this folder, registered by name; `import`, `export`, `info` and every place
that loads a head find it in `FORMATS`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file

from drafthead.heads.base import DraftHead
from drafthead.heads.errors import UserError
from drafthead.heads.formats.files import CONFIG_FILE, Checkpoint, checkpoints_at
from drafthead.heads.formats.keys import WRITTEN, Keys, Reasons
from drafthead.heads.storage.files import let_others_read
from drafthead.heads.target.features import Features
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import Path as TreePath

WEIGHTS = "model.safetensors"  # the file name of most formats
# A key of ours, which other readers ignore: tokens drafted after the root.
DEPTH = "drafthead_depth"


@dataclass(frozen=True)
class TargetFacts:
    """What is known of a head's target; None for what is not known."""

    name: str | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    num_layers: int | None = None

    @classmethod
    def of(cls, target: Target, name: str | None = None) -> "TargetFacts":
        """The facts of a loaded target."""
        return cls(name, target.hidden_size, target.vocab_size, target.num_layers)

    def completed(self, other: "TargetFacts") -> "TargetFacts":
        """These facts, with those of `other` where these are not known."""
        mine = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(other, **mine)


@dataclass(frozen=True)
class Foreign:
    """A head that was read from a checkpoint, converted to our configuration and names.

    Sizes that `config` leaves open, as 0 or None, come from the target; `needs_target` then names
    them, because a target must be given.
    """

    family: str
    config: Any  # of the family's config class
    tensors: dict[str, torch.Tensor]  # under the names of our state dict, in any floating type
    target: TargetFacts = TargetFacts()
    taps: str = "hidden state after the final norm"  # the file's name for its features, to display
    needs_target: str = ""
    notes: tuple[str, ...] = ()  # what was ignored or assumed
    # The file's copies of the target's `embedding` [V, D] or `output` [V, D]. Our head uses the
    # target's, unless they differ and the family can have its own embeddings.
    copies: dict[str, torch.Tensor] = field(default_factory=dict)
    path_counts: dict[TreePath, int] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Probe:
    """Inputs on which a reader's arithmetic is compared with ours.

    The target has run at T positions, each followed by a token; after the last token, the root, the
    head drafted a chain. The reader must compute logits for each token of the chain.
    """

    target: Target  # only for `embed` and `project`
    tokens: torch.Tensor  # [1, T], the token after each position; the last is the root
    features: Features  # [1, T, D]
    chain: torch.Tensor  # [K], drafted after the root


class Format(ABC):
    """A file layout that other software writes, reads, or both."""

    name: ClassVar[str]
    families: ClassVar[tuple[str, ...]]  # of heads that it can hold
    readers: ClassVar[str]  # software that reads such files

    @abstractmethod
    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint has this format, judged by its content and not by its name."""

    @abstractmethod
    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        """The head in a checkpoint; `target` describes the target that it will be used with.

        Raises UserError for anything that our head would not compute in the same way.
        """


class WritableFormat(Format):
    """A format that heads can be exported to."""

    @abstractmethod
    def write(
        self, head: DraftHead, facts: TargetFacts, target: Target | None, folder: Path
    ) -> None:
        """Write the head's files into an empty folder, tensors in the head's own types.

        `target` is there if the user named one; some readers expect copies of its weights. Raises
        UserError naming what the format cannot express.
        """

    @abstractmethod
    def replay(self, folder: Path, probe: Probe) -> torch.Tensor:
        """The reader's logits [K, V] for a probe, from the files only and in plain torch.

        Row k predicts token k of the chain from what comes before it. Tokens that the reader cannot
        draft have -inf.
        """


FORMATS: dict[str, Format] = {}


def register_format(cls: type[Format]) -> type[Format]:
    """Make a format known by name; raises ValueError when the name is taken."""
    if cls.name in FORMATS:
        raise ValueError(f"two formats are called {cls.name!r}")
    FORMATS[cls.name] = cls()
    return cls


class BaseName(Keys):
    """The key of many formats for the target's name, and those of any configuration."""

    neutral: ClassVar[Reasons] = WRITTEN
    base_model_name_or_path: str | None = None


def base_name(checkpoint: Checkpoint) -> str | None:
    """The target's name in the configuration."""
    return checkpoint.keys(BaseName).base_model_name_or_path


def refuse_others(checkpoint: Checkpoint, used: Iterable[str], prefix: str = "") -> None:
    """Raise UserError for tensors that begin with `prefix` and are not in `used`."""
    names = {name for name in checkpoint.tensors if name.startswith(prefix)}
    if others := sorted(names - set(used)):
        raise UserError(
            f"{checkpoint.weights} holds {len(others)} tensors that are not understood, the first "
            f"is {others[0]}"
        )


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `model.safetensors` with tensors of any shape [...]."""
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    let_others_read(folder / WEIGHTS)


def write_config(folder: Path, content: dict[str, Any]) -> None:
    """Write `config.json`."""
    (folder / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors [...] of a folder that was just written, for a replay."""
    checkpoint = next(checkpoints_at(folder))
    # Of our own files nothing is doubted: tied tensors count as often as they are named.
    return {name: checkpoint.file.load(name) for name in checkpoint.tensors}


def dtype_name(head: DraftHead) -> str:
    """The floating type of a head's weights as configurations spell it."""
    return str(next(head.parameters()).dtype).removeprefix("torch.")


def wanted(target: Target | None, name: str, what: str) -> Target:
    """The target, which the format called `name` needs; raises UserError when it is missing."""
    if target is None:
        raise UserError(f"{name} holds {what}: name the head's target with --target")
    return target


def copied(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy to write of a target's weight [V, D], in `dtype` if that loses nothing."""
    weight = weight.detach().cpu()
    rounded = weight.to(dtype)
    return (rounded if torch.equal(rounded.to(weight.dtype), weight) else weight).contiguous()
