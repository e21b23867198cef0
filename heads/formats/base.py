"""The interface of checkpoint formats: how files are recognised, read, written and checked.

A format is one class in this folder, registered by name; `import`, `export`, `info` and every place
that loads a head find it in `FORMATS`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file

from drafthead.core.errors import UserError
from drafthead.core.storage.files import let_others_read, write_json
from drafthead.core.target.features import Features
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Path as TreePath
from drafthead.heads.base import DraftHead
from drafthead.heads.formats.checkpoint import Checkpoint, checkpoints_at
from drafthead.heads.formats.files import CONFIG_FILE
from drafthead.heads.formats.keys import WRITTEN, Keys, Reasons

Tensors = dict[str, torch.Tensor]  # by name
WEIGHTS, PICKLE = "model.safetensors", "pytorch_model.bin"  # the file names of most formats
# A key of ours, which other readers ignore: tokens drafted after the root.
DEPTH = "drafthead_depth"


@dataclass(frozen=True)
class TargetFacts:
    """The known facts of a head's target; None for what is not known."""

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
class Export:
    """A head that is to be written, and its target as far as it is known."""

    head: DraftHead
    facts: TargetFacts
    target: Target | None  # if the user named one; some readers expect copies of its weights

    @property
    def config(self) -> Any:
        """The head's configuration, of its family's class."""
        return self.head.config

    @property
    def tensors(self) -> Tensors:
        """The head's tensors [...] under our names, in their own types."""
        return dict(self.head.state_dict())

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of the head's weights."""
        return next(self.head.parameters()).dtype

    @property
    def dtype_name(self) -> str:
        """The floating type as configurations spell it."""
        return str(self.dtype).removeprefix("torch.")

    def copied(self, weight: torch.Tensor) -> torch.Tensor:
        """A copy of a target's weight [V, D], in the head's type if that loses nothing."""
        weight = weight.detach().cpu()
        rounded = weight.to(self.dtype)
        return rounded if torch.equal(rounded.to(weight.dtype), weight) else weight


@dataclass(frozen=True)
class Written:
    """The files of an exported head."""

    tensors: Tensors
    config: dict[str, Any]
    weights: str = WEIGHTS  # the name of the file of tensors, a pickle unless in safetensors

    def save(self, folder: Path) -> None:
        """Write tensors and configuration into a folder."""
        file = folder / self.weights
        stored = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        if file.suffix == ".safetensors":
            save_file(stored, file, metadata={"format": "pt"})
            let_others_read(file)
        else:
            torch.save(stored, file)
        write_json(folder / CONFIG_FILE, self.config)


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

    @property
    def states(self) -> torch.Tensor:
        """The target's last hidden states [T, D] in float32."""
        assert self.features.last is not None
        return self.features.last[0].float()

    @property
    def before(self) -> torch.Tensor:
        """The token [K] before each token of the chain: the root, then the chain."""
        return torch.cat([self.tokens[0, -1:], self.chain[:-1]])


class Format(ABC):
    """A file layout that other software writes, reads, or both."""

    name: ClassVar[str]
    families: ClassVar[tuple[str, ...]]  # of heads that it can hold
    readers: ClassVar[str]  # software that reads such files

    @abstractmethod
    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Tell whether a checkpoint has this format, judged by its content and not by its name."""

    @abstractmethod
    def read(self, checkpoint: Checkpoint, target: TargetFacts) -> Foreign:
        """The head in a checkpoint; `target` describes the target that it will be used with.

        Raises UserError for anything that our head would not compute in the same way.
        """


class WritableFormat(Format):
    """A format that heads can be exported to."""

    @abstractmethod
    def written(self, export: Export) -> Written:
        """The files that hold a head; raises UserError naming what the format cannot express."""

    @abstractmethod
    def replayed(self, config: dict[str, Any], tensors: Tensors, probe: Probe) -> torch.Tensor:
        """The reader's logits [K, V] for a probe, in plain torch.

        `config` and `tensors` are those of the files, floating types as float32. Row k predicts
        token k of the chain from what comes before it. Tokens that the reader cannot draft have
        -inf.
        """

    def replay(self, folder: Path, probe: Probe) -> torch.Tensor:
        """The reader's logits [K, V] for a probe, from files that were just written."""
        checkpoint = next(checkpoints_at(folder))
        # Of our own files nothing is doubted: tied tensors count as often as they are named.
        stored = {name: checkpoint.file.load(name) for name in checkpoint.tensors}
        tensors = {n: t.float() if t.is_floating_point() else t for n, t in stored.items()}
        return self.replayed(checkpoint.config, tensors, probe)

    def cannot_express(self, what: str) -> UserError:
        """The error for a head that the format's readers would not compute as ours."""
        return UserError(f"{self.name} cannot express {what}")

    def refuse_options(self, config: Any, known: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise UserError for the first option of a head whose value is not among those known."""
        for option, values in known.items():
            if (value := getattr(config, option)) not in values:
                raise self.cannot_express(f"head.{option} {value!r}")

    def needed_target(self, export: Export, what: str) -> Target:
        """The target, of which the files hold `what`; raises UserError when it is missing."""
        if export.target is None:
            raise UserError(f"{self.name} holds {what}: name the head's target with --target")
        return export.target


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
