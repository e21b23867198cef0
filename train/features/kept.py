"""The target's features of packed rows, kept on disk: later epochs and other heads read them.

The target's pass is most of a training step, and has the same result each time. The first epoch
writes one safetensors file for each row; the later ones read it, without a pass. A file appears
whole or not at all, so a killed run, or several processes in one folder, do no harm.
"""

import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

from drafthead.core.errors import UserError
from drafthead.core.storage.files import replacing, write_json
from drafthead.core.target.block_modules import kinds_of
from drafthead.core.target.features import NO_FEATURES, Features, FeatureSpec
from drafthead.core.target.target import Target
from drafthead.heads.base import DraftHead
from drafthead.heads.formats.files import read_json
from drafthead.train.data.packing import PackedData
from drafthead.train.data.training_rows import Sources
from drafthead.train.settings import DataConfig

logger = logging.getLogger(__name__)

RECORD = "features.json"
ROWS_IN_A_FOLDER = 1000


@dataclass(frozen=True)
class FeatureSource:
    """The source that features depend on; a folder keeps those of one source."""

    target: str  # its `weights_fingerprint`
    settings: str  # a digest of its configuration: the same weights may be read otherwise
    rows: str  # `PackedData.fingerprint`
    dtype: str  # of the hidden states
    mixed_precision: str


def feature_bytes(spec: FeatureSpec, hidden_size: int, dtype: torch.dtype) -> int:
    """Return what one position takes on the disk, of hidden states [D] of that type."""
    return (len(spec.layers) + spec.last) * hidden_size * dtype.itemsize


class KeptFeatures:
    """The features in one folder."""

    def __init__(self, folder: Path, source: FeatureSource, spec: FeatureSpec):
        """`spec` are the hidden states that `read` returns and `write` gets.

        Raises UserError when the folder keeps features of another source.
        """
        self.folder, self.spec = folder, spec
        names = [f"layer {layer}" for layer in spec.layers]
        self.names = [*names, "last"] if spec.last else names
        self.rows = sys.maxsize  # that are kept, from the first: see `reserve`
        folder.mkdir(parents=True, exist_ok=True)
        record = folder / RECORD
        if not record.exists():
            write_json(record, asdict(source))
        kept = read_json(record)
        for name, value in asdict(source).items():
            if kept.get(name) != value:
                raise UserError(
                    f"{folder} keeps the features of other {name} ({kept.get(name)}, not {value}): "
                    "set data.feature_folder to another folder, or delete that one"
                )

    def reserve(self, row_bytes: Sequence[int], budget_gb: float | None = None) -> None:
        """Keep the first rows whose bytes fit into the budget, all without one; log what they need.

        Raises UserError when the budget has no room for a row, or the disk none for them all.
        """
        budget = float("inf") if budget_gb is None else 1e9 * budget_gb
        self.rows = sum(total <= budget for total in accumulate(row_bytes))
        if not self.rows:
            raise UserError(
                f"data.feature_budget_gb={budget_gb} has no room for a row of "
                f"{row_bytes[0] / 1e9:.3g} GB: raise it, or leave out data.feature_folder"
            )
        there = [self.path(row).exists() for row in range(self.rows)]
        missing = sum(b for b, done in zip(row_bytes, there, strict=False) if not done)
        logger.info(
            "features of %d of %d rows are kept in %s: %d are there, the others need %.1f GB",
            self.rows,
            len(row_bytes),
            self.folder,
            sum(there),
            missing / 1e9,
        )
        free = shutil.disk_usage(self.folder).free
        if missing > free:
            raise UserError(
                f"the features of {self.rows - sum(there)} rows need {missing / 1e9:.1f} GB in "
                f"{self.folder}, where {free / 1e9:.1f} are free: set data.feature_folder to a "
                "folder on a larger disk, data.feature_budget_gb to less, or leave both out"
            )

    def path(self, row: int) -> Path:
        """The file of a row."""
        return self.folder / f"{row // ROWS_IN_A_FOLDER:04d}" / f"row-{row}.safetensors"

    def read(self, row: int) -> Features | None:
        """The features [T, D] of a row; None when a layer is missing or the file is damaged."""
        try:
            with safe_open(self.path(row), "pt") as file:
                states = [file.get_tensor(name) for name in self.names]
        except (OSError, SafetensorError):  # of a name that is not there as well
            return None
        taps = tuple(states[: len(self.spec.layers)])
        return Features(states[-1] if self.spec.last else None, taps)

    def write(self, row: int, features: Features) -> None:
        """Keep the features [T, D] of a row, beside the layers that its file has already."""
        path = self.path(row)
        path.parent.mkdir(exist_ok=True)
        tensors = self._other_layers(path)
        last = [] if features.last is None else [features.last]
        for name, hidden in zip(self.names, [*features.taps, *last], strict=True):
            # A copy: a file cannot hold one tensor under two names.
            tensors[name] = hidden.cpu().clone(memory_format=torch.contiguous_format)
        with replacing(path) as temporary:
            save_file(tensors, temporary)

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
    return Features.joined(rows, partial(pad_sequence, batch_first=True))


def digest_of_settings(target: Target) -> str:
    """A digest of the target's configuration."""
    settings = json.dumps(target.config.to_diff_dict(), sort_keys=True, default=str)
    return hashlib.sha256(settings.encode()).hexdigest()[:16]


def kept_features(
    config: DataConfig,
    mixed_precision: str,
    head: DraftHead,
    target: Target,
    rows: PackedData,
    sources: Sources,
) -> KeptFeatures | None:
    """The features of the training rows in `data.feature_folder`, if there is one.

    Raises UserError for a folder of something else, and when there is nothing to keep or no room.
    """
    if config.feature_folder is None:
        return None
    spec, dtype = head.features_needed, str(target.dtype)
    if spec == NO_FEATURES:
        raise UserError(
            "data.feature_folder keeps the target's features, of which a draft model with "
            f"head.loss={head.config.loss} reads none: leave it out"
        )
    if kinds := kinds_of(target.model):
        dtype += f" by weights of {kinds}"
    settings = digest_of_settings(target)
    source = FeatureSource(sources.target, settings, sources.data, dtype, mixed_precision)
    kept = KeptFeatures(Path(config.feature_folder), source, spec)
    size = feature_bytes(spec, target.hidden_size, target.dtype)
    lengths = [rows.row_length(row) for row in range(len(rows.rows))]
    kept.reserve([size * length for length in lengths], config.feature_budget_gb)
    return kept
