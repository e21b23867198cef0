"""Data sets of the hub, read as they arrive: a limit of rows needs no download of the others."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import DatasetBuilder, load_dataset_builder
from huggingface_hub.errors import HTTPError

from drafthead.heads.errors import UserError

Values = dict[str, Any]  # of a row, by column


@dataclass(frozen=True)
class HubData:
    """One split of a data set."""

    source: str  # as it was written: NAME, NAME:SPLIT or NAME:CONFIG:SPLIT
    builder: DatasetBuilder
    split: str

    @classmethod
    def named(cls, source: str) -> "HubData":
        """The data set of a name; its rows are not asked for yet.

        Raises UserError where there is none, or no way to it.
        """
        name, *selection = source.split(":")
        split = selection.pop() if selection else "train"
        with _readable(source):
            return cls(source, load_dataset_builder(name, *selection), split)

    @property
    def digest(self) -> str:
        """Names the revision, the configuration and the split, without reading a row."""
        return f"{self.builder.cache_dir}:{self.split}"

    def rows(self) -> Iterator[Values]:
        """Its rows in order, from `datasets`' own cache if they were downloaded before.

        Raises UserError where they do not arrive.
        """
        with _readable(self.source):
            yield from self._data()

    def _data(self) -> Iterable[Values]:
        if Path(self.builder.cache_dir).exists():
            return self.builder.as_dataset(self.split)
        return self.builder.as_streaming_dataset(self.split)


@contextmanager
def _readable(source: str) -> Iterator[None]:
    """Errors of the network and of wrong names as one sentence."""
    try:
        yield
    except (OSError, ValueError, HTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{source} is neither a file nor a data set that can be loaded ({reason}); "
            "data sets are written NAME, NAME:SPLIT or NAME:CONFIG:SPLIT"
        ) from error
