"""Reading files of a checkpoint that may be hostile: nothing is trusted, nothing is executed.

Sizes, shapes and offsets that a file claims are compared with its real size before anything is
allocated, and all tensors that are loaded share one budget of bytes (`Checkpoint.load`). JSON and
pickles, where a byte or two may become an object of hundreds, have a budget of objects. So reading
takes at most four times the file's size, and 32 MiB that do not depend on it. Links and paths out
of the folder are refused. A pickle is scanned before it is loaded: tensors are allowed, code is
not.
"""

import json
import os
import pickletools
import zipfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from stat import S_ISLNK, S_ISREG
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open

from drafthead.core.errors import UserError
from drafthead.core.printing import shown
from drafthead.heads.formats.keys import Keys

CONFIG_FILE = "config.json"
PICKLES = (".pt", ".pth", ".bin")
INDEX = ".index.json"
MAX_JSON, MAX_HEADER = 4 * 2**20, 16 * 2**20  # bytes
MOST_SIGNS = 2**18  # that begin or part values of a JSON text; an object in memory takes 100 bytes
MOST_TENSORS, MOST_DIMENSIONS = 2**16, 8  # of a file; of a tensor
# Every opcode of a pickle may make an object, every third a tensor of 600 bytes. An honest tensor
# takes about 30 opcodes, so these are for 3,000 tensors of any size, or any number of 2 kB each.
FREE_OPCODES, BYTES_PER_OPCODE = 100_000, 64
SMALL = 2**20  # bytes of a file that may be sparse

# All globals that a pickle of plain tensors needs; any other might be code.
PLAIN_GLOBALS = frozenset(
    {
        "collections OrderedDict",
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_parameter",
        *(f"torch {kind}Storage" for kind in ("Double", "Float", "Half", "BFloat16")),
        *(f"torch {kind}Storage" for kind in ("Long", "Int", "Short", "Char", "Byte", "Bool")),
    }
)
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Stored:
    """Shape and type of a tensor, known before it is loaded."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return prod(self.shape) * self.dtype.itemsize


def file_size(path: Path) -> int:
    """Size in bytes of a plain file.

    Raises UserError for a link (but see `behind_hub_link`), a folder, a device, and a file that is
    mostly holes: it would take much more memory than disk.
    """
    try:
        status = behind_hub_link(path).lstat()
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        message = f"{path} does not exist: is {path.parent} a trained head?"
        raise UserError(message) from error
    if S_ISLNK(status.st_mode):
        raise UserError(f"{path} is a link, which a checkpoint must not hold: copy the file itself")
    if not S_ISREG(status.st_mode):
        raise UserError(f"{path} is not a plain file")
    if status.st_size > SMALL and (written := written_bytes(path, status.st_size)) < (
        status.st_size / 2
    ):
        raise UserError(
            f"{path} is sparse: {written:,} of its {status.st_size:,} bytes were written"
        )
    return status.st_size


def written_bytes(path: Path, size: int) -> int:
    """Bytes of a file that are not in holes; all of them where the system does not tell."""
    if not hasattr(os, "SEEK_DATA"):
        return size
    written = end = 0
    with path.open("rb") as file:
        # Beyond half of the file it does not matter how much more there is.
        while end < size and 2 * written <= size:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:  # no data from here on
                return written
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            written += end - start
    return written


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises UserError naming the file."""
    if (size := file_size(path)) > MAX_JSON:
        raise UserError(f"{path} has {size:,} bytes, too many for a configuration")
    text = path.read_bytes()
    check_json(path, text)
    try:
        content = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


def check_json(path: Path, text: bytes) -> None:
    """Raise UserError for JSON with so many values that they would fill the memory."""
    signs = sum(text.count(sign) for sign in b"[{,:")
    if signs > MOST_SIGNS:
        raise UserError(f"{path} holds {signs:,} JSON values and separators, too many for a head")


class TensorFile:
    """The tensors of one file by name; shapes and types are known before they are loaded."""

    stored: dict[str, Stored]

    def __init__(self, path: Path):
        """Raises UserError for a file that is damaged, or claims more than it holds."""
        self.path, self.size = path, file_size(path)

    def check_number(self, count: int) -> None:
        """Raise UserError for more tensors than a file of weights has."""
        if count > MOST_TENSORS:
            raise UserError(f"{self.path} holds {count:,} tensors, more than {MOST_TENSORS:,}")

    def described(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Stored:
        """The facts of a tensor; raises UserError for more dimensions than weights have."""
        if len(shape) > MOST_DIMENSIONS:
            raise UserError(f"{self.path}: {shown(name)} has {len(shape)} dimensions")
        return Stored(shape, dtype)

    def mapped(self, name: str) -> torch.Tensor:
        """One tensor [...], a view of the mapped file."""
        raise NotImplementedError

    def name_in_file(self, name: str) -> str:
        """Return what the file itself calls a tensor."""
        return name

    def load(self, name: str) -> torch.Tensor:
        """One tensor [...], in its own memory."""
        return self.mapped(name).clone(memory_format=torch.contiguous_format)


class SafetensorsFile(TensorFile):
    """A safetensors file; the library checks that its header matches the number of bytes."""

    def __init__(self, path: Path):
        super().__init__(path)
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            if header > min(MAX_HEADER, self.size):
                raise UserError(
                    f"{path} is damaged or truncated: its header claims {header:,} bytes"
                )
            check_json(path, file.read(header))
        try:
            self.opened = safe_open(path, "pt")
            names = self.opened.keys()
            self.check_number(len(names))
            self.stored = {name: self._stored(name) for name in names}
        except UserError:
            raise
        except KeyError as error:
            raise UserError(f"{path} holds tensors of the unsupported type {error}") from error
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{path} is damaged or truncated: {error}") from error

    def _stored(self, name: str) -> Stored:
        part = self.opened.get_slice(name)
        return self.described(name, tuple(part.get_shape()), DTYPES[part.get_dtype()])

    def mapped(self, name: str) -> torch.Tensor:
        """The tensor [...] of a name, read when it is used."""
        return self.opened.get_tensor(name)


class PickledFile(TensorFile):
    """A dictionary of tensors written by `torch.save`."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._check_archive()
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch.load raises many kinds for a damaged file
            raise UserError(f"{path} is damaged or truncated: {reason_of(error)}") from error
        if not isinstance(content, dict):
            raise UserError(f"{path} holds {type(content).__name__}, not tensors by name")
        self.check_number(len(content))
        self.content: dict[str, torch.Tensor] = content
        self.stored = {name: self._checked(name, t) for name, t in content.items()}

    def _check_archive(self) -> None:
        """Raise UserError unless all entries are uncompressed and the pickle is only tensors."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                entries = archive.infolist()
                for entry in entries:
                    if entry.compress_type or entry.file_size != entry.compress_size:
                        raise UserError(f"{self.path} is compressed, which torch.save never does")
                if sum(entry.file_size for entry in entries) > self.size:
                    raise UserError(f"{self.path} claims to hold more than its own size")
                pickles = [e.filename for e in entries if e.filename.endswith("/data.pkl")]
                if len(pickles) != 1:
                    raise UserError(f"{self.path} is no file of torch.save: it has no data.pkl")
                self._check_pickle(archive.read(pickles[0]))
        except UserError:
            raise
        except Exception as error:  # damaged archives raise many kinds
            raise UserError(
                f"{self.path} is damaged or truncated, or written by torch before 1.6: {error}"
            ) from error

    def _check_pickle(self, program: bytes) -> None:
        """Refuse a pickle that names anything but tensors, or builds many more objects."""
        most = FREE_OPCODES + self.size // BYTES_PER_OPCODE
        for number, (opcode, argument, _) in enumerate(pickletools.genops(program)):
            if number > most:
                raise UserError(f"{self.path} holds more than {most:,} objects, not only tensors")
            named = opcode.name in ("GLOBAL", "INST", "STACK_GLOBAL")
            if named and argument not in PLAIN_GLOBALS:
                what = "code" if argument is None else str(argument).replace(" ", ".")
                raise UserError(
                    f"{self.path} holds code ({what}) beside plain tensors and is not loaded"
                )

    def _checked(self, name: object, tensor: object) -> Stored:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise UserError(f"{self.path}: {shown(name)} is {type(tensor).__name__}, not a tensor")
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.dtype not in DTYPES.values():
            raise UserError(f"{self.path}: {name} is a tensor of an unsupported kind")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise UserError(
                f"{self.path}: {shown(name)} claims {shown(list(tensor.shape))}, more than it holds"
            )
        return self.described(name, tuple(tensor.shape), tensor.dtype)

    def mapped(self, name: str) -> torch.Tensor:
        """The tensor [...] of a name."""
        return self.content[name].detach()


class IndexKeys(Keys):
    """An index of shards."""

    # Not `dict[str, str]`, of which every wrong value would be reported.
    weight_map: Annotated[dict[str, Any], Field(min_length=1)]


class ShardedFile(TensorFile):
    """Tensors in several files of a folder, which an index file lists."""

    def __init__(self, path: Path):
        super().__init__(path)
        places = IndexKeys.of(read_json(path), path).weight_map
        for name in places.values():
            plain = isinstance(name, str) and name.isprintable() and Path(name).name == name
            if not plain or name in ("", ".", ".."):
                raise UserError(f"{path} names {shown(name)}, which is not a file of its folder")
        self.shards = {name: open_tensors(path.parent / name) for name in set(places.values())}
        self.size += sum(shard.size for shard in self.shards.values())
        self.places: dict[str, str] = places
        for name, file in places.items():
            if name not in self.shards[file].stored:
                raise UserError(
                    f"{path} lists {shown(name)} in {shown(file)}, which does not hold it"
                )
        self.stored = {name: self.shards[file].stored[name] for name, file in places.items()}

    def mapped(self, name: str) -> torch.Tensor:
        """The tensor [...] of a name, from its shard."""
        return self.shards[self.places[name]].mapped(name)


def open_tensors(path: Path) -> TensorFile:
    """The tensors of a file whose kind is known by its suffix."""
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in PICKLES:
        return PickledFile(path)
    raise UserError(f"{path} is neither safetensors nor one of {', '.join(PICKLES)}")


def reason_of(error: Exception) -> str:
    """Say why torch does not load a pickle, on one line.

    Its first line may advise to load the pickle with its code; the reason comes later.
    """
    message = str(error).strip() or repr(error)
    return message.rpartition("WeightsUnpickler error:")[2].strip().splitlines()[0]


def behind_hub_link(path: Path) -> Path:
    """The end of a link in a snapshot of the hub's cache; `path` itself if it is anything else.

    The cache shows a file as a link: ``models--OWNER--NAME/snapshots/COMMIT/config.json`` leads to
    ``models--OWNER--NAME/blobs/HASH``. No other link in a checkpoint is followed.

    Worked example: ``models--a--b/snapshots/12/config.json``, a link to ``../../blobs/34``, gives
    ``models--a--b/blobs/34``. Of a link to ``../../../other/blobs/34`` the path itself is returned.
    """
    if not path.is_symlink():
        return path
    leads_to = Path(path.parent, path.readlink())
    for snapshot in path.absolute().parents:
        if snapshot.parent.name == "snapshots":
            blobs = (snapshot.parent.parent / "blobs").resolve()
            blob = leads_to.parent.resolve() / leads_to.name  # which may not be a link itself
            return blob if blob.parent == blobs else path
    return path
