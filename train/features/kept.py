"""The target's features of packed rows, kept on disk: later epochs and other heads read them.

The target's pass is most of a training step, and has the same result each time. The first epoch
writes one safetensors file for each row; the later ones read it, without a pass. A file appears
whole or not at all, so a killed run, or several processes in one folder, do no harm.
"""

import json
import logging
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from drafthead.heads.errors import UserError
from drafthead.heads.files import write_text
from drafthead.heads.formats.files import read_json
from drafthead.heads.target.features import Features, FeatureSpec

logger = logging.getLogger(__name__)

RECORD = "features.json"
ROWS_IN_A_FOLDER = 1000


@dataclass(frozen=True)
class FeatureSource:
    """What features depend on; a folder keeps those of one source."""

    target: str  # its `weights_fingerprint`
    rows: str  # `PackedData.fingerprint`
    dtype: str  # of the hidden states
    mixed_precision: str


class KeptFeatures:
    """The features in one folder."""

    def __init__(self, folder: Path, source: FeatureSource, spec: FeatureSpec):
        """`spec` are the hidden states that `read` returns and `write` gets.

        Raises UserError when the folder keeps features of another source.
        """
        self.folder, self.spec = folder, spec
        names = [f"layer {layer}" for layer in spec.layers]
        self.names = [*names, "last"] if spec.last else names
        folder.mkdir(parents=True, exist_ok=True)
        record = folder / RECORD
        if not record.exists():
            write_text(record, json.dumps(asdict(source), indent=2) + "\n")
        kept = read_json(record)
        for name, value in asdict(source).items():
            if kept.get(name) != value:
                raise UserError(
                    f"{folder} keeps the features of other {name} ({kept.get(name)}, not {value}): "
                    "set data.feature_folder to another folder, or delete that one"
                )

    def check_space(self, num_rows: int, row_bytes: int) -> None:
        """Log what the rows without a file take, `row_bytes` each on average.

        Raises UserError when the disk has no room for it.
        """
        there = sum(self.path(row).exists() for row in range(num_rows))
        missing, free = (num_rows - there) * row_bytes, shutil.disk_usage(self.folder).free
        logger.info(
            "features are kept in %s: %d of %d rows are there, the others need %.1f GiB",
            self.folder,
            there,
            num_rows,
            missing / 2**30,
        )
        if missing > free:
            raise UserError(
                f"the features of {num_rows - there} rows need {missing / 2**30:.1f} GiB in "
                f"{self.folder}, where {free / 2**30:.1f} are free: set data.feature_folder to a "
                "folder on a larger disk, or leave it out"
            )

    def path(self, row: int) -> Path:
        """The file of a row."""
        return self.folder / f"{row // ROWS_IN_A_FOLDER:04d}" / f"row-{row}.safetensors"

    def read(self, row: int) -> Features | None:
        """The features [T, D] of a row; None when a layer is missing or the file is damaged."""
        try:
            with safe_open(self.path(row), "pt") as file:
                if not set(self.names) <= set(file.keys()):
                    return None
                kept = [file.get_tensor(name) for name in self.names]
        except (OSError, SafetensorError):
            return None
        return Features(kept[-1], tuple(kept[:-1])) if self.spec.last else Features(None, (*kept,))

    def write(self, row: int, features: Features) -> None:
        """Keep the features [T, D] of a row, beside the layers that its file has already."""
        path = self.path(row)
        path.parent.mkdir(exist_ok=True)
        tensors = self._other_layers(path)
        last = [] if features.last is None else [features.last]
        for name, hidden in zip(self.names, [*features.taps, *last], strict=True):
            # A copy, because two names may stand for one tensor, which a file cannot hold twice.
            tensors[name] = hidden.cpu().clone(memory_format=torch.contiguous_format)
        temporary = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        try:
            save_file(tensors, temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _other_layers(self, path: Path) -> dict[str, torch.Tensor]:
        try:
            with safe_open(path, "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return {}


def of_row(batch: Features, row: int, length: int) -> Features:
    """The first `length` positions [length, D] of one row of a batch [B, T, D]."""
    return batch.map(lambda hidden: hidden[row, :length])


def padded(rows: Sequence[Features]) -> Features:
    """Rows of features [T, D] as one batch [B, longest T, D], with zeros on the right."""

    def batch(hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(hidden), batch_first=True)

    last = [row.last for row in rows if row.last is not None]
    taps = zip(*(row.taps for row in rows), strict=True)
    return Features(batch(last) if last else None, tuple(batch(tap) for tap in taps))
