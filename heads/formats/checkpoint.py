"""A checkpoint: a configuration and one set of weights, in a folder or on the Hugging Face hub."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError

from drafthead.core.errors import UserError, first_line
from drafthead.core.printing import shown
from drafthead.core.storage.names import SHIPPED_HEADS, may_be_hub_id, refuse_missing_head
from drafthead.heads.formats.files import (
    CONFIG_FILE,
    INDEX,
    PICKLES,
    ShardedFile,
    Stored,
    TensorFile,
    open_tensors,
    read_json,
)
from drafthead.heads.formats.keys import Account, Keys

KeysType = TypeVar("KeysType", bound=Keys)

# A file may hold one tensor under several names, but not so often that memory runs out.
MOST_REPEATED = 2
SAFE_FILES = ["*.json", "*.safetensors"]
PICKLED_FILES = ["*.json", "*.bin", "*.pt", "*.pth"]  # scanned before they are loaded
# Names of modules that training wraps around others, and outer ones that some projects save too.
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
OUTER = ("draft_model.", "model.")
# How other projects begin names, and how most do: TorchSpec, Model-Optimizer, older SpecForge.
USUAL = {
    "context_proj.": "fc.",
    "context_norm.": "hidden_norm.",
    "final_norm.": "norm.",
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "gate_proj.": "markov_head.gate_proj.",
    "joint_proj.": "markov_head.joint_proj.",
    "confidence_proj.": "confidence_head.proj.",
    "logit_head.": "",
}


def usual_name(name: str) -> str:
    """The name that most projects give to a tensor.

    ``_orig_mod.model.layers.0.mlp.up_proj.weight`` is ``layers.0.mlp.up_proj.weight``.
    """
    name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    for outer in OUTER:
        name = name.removeprefix(outer)
    for theirs, usual in USUAL.items():
        if name.startswith(theirs):
            return usual + name.removeprefix(theirs)
    return name


class RenamedFile(TensorFile):
    """The tensors of a file under other names."""

    def __init__(self, file: TensorFile, names: dict[str, str]):
        """`names` are those in the file by the new ones."""
        self.path, self.size, self.inner, self.names = file.path, file.size, file, names
        self.stored = {name: file.stored[old] for name, old in names.items()}

    def mapped(self, name: str) -> torch.Tensor:
        """The tensor [...] by its new name."""
        return self.inner.mapped(self.names[name])

    def name_in_file(self, name: str) -> str:
        return self.names[name]


def renamed(file: TensorFile) -> TensorFile:
    """A file whose tensors have their usual names; raises UserError when two have the same one."""
    names: dict[str, str] = {}
    for name in file.stored:
        if (other := names.setdefault(usual_name(name), name)) != name:
            raise UserError(f"{file.path} holds {shown(other)} and {shown(name)}, which are one")
    if all(name == old for name, old in names.items()):
        return file
    return RenamedFile(file, names)


@dataclass
class Checkpoint:
    """A configuration and one set of weights in its folder, which is opened at first use."""

    path: Path  # as the user named it
    weights: Path  # a file of tensors, or an index of several
    config: dict[str, Any]  # {} when there is no config.json
    loaded: int = 0  # bytes so far
    account: Account = field(default_factory=Account)  # of the configuration's keys

    @cached_property
    def file(self) -> TensorFile:
        """The opened weights under their usual names; raises UserError when they are damaged."""
        if self.weights.name.endswith(INDEX):
            return renamed(ShardedFile(self.weights))
        return renamed(open_tensors(self.weights))

    @property
    def tensors(self) -> dict[str, Stored]:
        """Shape and type of every tensor by name; nothing is loaded."""
        return self.file.stored

    @property
    def size(self) -> int:
        """Bytes of the weights on disk."""
        return self.file.size

    @property
    def config_file(self) -> Path:
        """Return where the configuration is, if there is one."""
        return self.weights.parent / CONFIG_FILE

    def keys(self, declared: type[KeysType], *place: str) -> KeysType:
        """The declared keys of the configuration, or of the object in it to which keys lead.

        Raises UserError naming the file, the key and its value.
        """
        self.account.add(declared, place)
        return declared.of(self.section(*place), self.config_file, ".".join(place))

    def section(self, *place: str) -> dict[str, Any]:
        """The configuration, or the object in it to which keys lead; {} if there is none.

        Raises UserError when there is something else.
        """
        found: Any = self.config
        for depth, key in enumerate(place):
            found = found.get(key)
            if found is None:
                return {}
            if not isinstance(found, dict):
                named = ".".join(place[: depth + 1])
                raise UserError(
                    f"{self.config_file}: {named} is {shown(found)}, but must be an object"
                )
        return found

    def load(self, name: str) -> torch.Tensor:
        """One tensor [...] on the CPU, as stored.

        Raises UserError when there is none, and when all that was loaded would take much more
        memory than the file has bytes: several tensors of a pickle may be views of one storage.
        """
        self.loaded += self._stored(name).nbytes
        if self.loaded > MOST_REPEATED * self.size:
            raise UserError(
                f"{self.weights} has {self.size:,} bytes but its tensors would take at least "
                f"{self.loaded:,}"
            )
        return self.file.load(name)

    def same(self, name: str, other: str) -> bool:
        """Tell whether two tensors are equal; none is copied."""
        if self._stored(name) != self._stored(other):
            return False
        return torch.equal(self.file.mapped(name), self.file.mapped(other))

    def shape(self, name: str, dimensions: int) -> tuple[int, ...]:
        """Shape of a tensor; raises UserError when it has another number of dimensions."""
        shape = self._stored(name).shape
        if len(shape) != dimensions:
            raise UserError(f"{self.weights}: {name} has shape {shown(list(shape))}")
        return shape

    def present(self, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """The tensors [...] that there are of `names`, under the keys of `names`."""
        return {key: self.load(name) for key, name in names.items() if name in self.tensors}

    def check_flag(self, key: str, stated: bool | None, found: bool) -> None:
        """Raise UserError when a key states something else than the tensors show."""
        if stated not in (None, found):
            raise UserError(f"{self.weights}: {key} is {stated}, but its tensors say otherwise")

    def _stored(self, name: str) -> Stored:
        if name not in self.tensors:
            raise UserError(f"{self.weights} lacks the tensor {name}")
        return self.tensors[name]


def checkpoints_at(path: Path) -> Iterator[Checkpoint]:
    """Every set of weights in a folder, or the one file, each with the folder's configuration.

    OWNER/NAME that is not here is looked for on the hub. Raises UserError when there are no weights
    at all.
    """
    path = local_copy(path)
    refuse_missing_head(str(path))
    folder = path if path.is_dir() else path.parent
    has_config = (folder / CONFIG_FILE).exists() or (folder / CONFIG_FILE).is_symlink()
    config = read_json(folder / CONFIG_FILE) if has_config else {}
    found = [path] if path != folder else weight_files(folder)
    if not found:
        raise UserError(
            f"{folder / 'model.safetensors'} does not exist, nor any other file in .safetensors, "
            f"{', '.join(PICKLES)}: is {path} a trained head?"
        )
    for weights in found:
        yield Checkpoint(path, weights, config)


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder that may hold weights, the most likely first.

    An index replaces the files that it lists; safetensors come before pickles.
    """
    names = sorted(entry.name for entry in folder.iterdir())
    kinds = (".safetensors" + INDEX, ".bin" + INDEX, ".safetensors", *PICKLES)
    by_kind = [[name for name in names if name.endswith(kind)] for kind in kinds]
    ordered = [name for names in by_kind for name in names]
    likely = ("model.safetensors", "pytorch_model.bin")
    ordered.sort(key=lambda name: (not name.endswith(INDEX), name not in likely))
    return [folder / name for name in ordered]


def local_copy(path: Path) -> Path:
    """`path` if it is here; else the folder of a shipped head, or of OWNER/NAME's files on the hub.

    Pickles are brought only where there is no file in safetensors. Raises UserError where the hub
    cannot be reached, or does not have or give the repository.
    """
    if not path.exists() and str(path) in SHIPPED_HEADS:
        return Path(str(resources.files("drafthead.assets") / SHIPPED_HEADS[str(path)]))
    if path.exists() or not may_be_hub_id(path):
        return path
    try:
        folder = Path(snapshot_download(str(path), allow_patterns=SAFE_FILES))
        if not any(folder.rglob("*.safetensors")):
            folder = Path(snapshot_download(str(path), allow_patterns=PICKLED_FILES))
    except GatedRepoError as error:
        reason = "whoever wants it has to agree to its terms on the hub, and log in: hf auth login"
        raise UserError(f"the hub refuses access to {path}: {reason}") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{path} does not exist, neither here nor on the hub (one that is not public needs a "
            "login: hf auth login)"
        ) from error
    except (HTTPError, OSError, ValueError) as error:
        reason = first_line(error)
        raise UserError(
            f"{path} does not exist here, and the hub cannot be reached: {reason}"
        ) from error
    return folder
