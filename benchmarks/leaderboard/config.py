"""The file of a leaderboard: which heads are trained, on what, how long, and how they race."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from drafthead.heads.errors import UserError
from drafthead.infer.loaded import DEFAULT_CHAIN
from drafthead.lab.races.racing import RaceTerms
from drafthead.train.run.config import (
    Given,
    RunConfig,
    build_section,
    check_names,
    load_run_config,
    read_override,
    read_yaml,
)

# Settings that an entry may not have: they are the same for all.
SHARED = ("train.max_minutes", "train.max_steps", "train.epochs", "train.output", "target.name")
ENTRIES = "entries"


@dataclass(frozen=True)
class BoardTarget:
    """The model that drafts are made for; `dtype` is used in the race, training has its own."""

    name: str
    dtype: str = "auto"


@dataclass(frozen=True)
class BoardData:
    """The data of every entry, unless its own settings override it."""

    train: str
    validation: str


@dataclass(frozen=True)
class BoardTraining:
    """The duration of each training, and the folder of heads and results."""

    output: str
    minutes: float = 6.0

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ValueError(f"minutes must be above 0, got {self.minutes}")


@dataclass(frozen=True)
class BoardRace:
    """How the trained heads are compared; `engines` and `tree_nodes` may hold several choices."""

    prompts: str
    draft_model: str | None = None
    draft_tokens: int = DEFAULT_CHAIN  # most tokens that the draft model and prompt lookup draft
    temperatures: tuple[float, ...] = (0.0, 1.0)
    limit: int = 20  # prompts
    max_new_tokens: int = 128
    rounds: int = 3
    engines: tuple[Literal["eager", "compiled"], ...] = ("compiled",)
    tree_nodes: tuple[int | Literal["planned"], ...] = ("planned",)  # the root included
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("engines", "tree_nodes", "temperatures"):
            chosen = getattr(self, name)
            if not chosen or len(set(chosen)) < len(chosen):
                raise ValueError(f"{name} must hold at least one choice and none twice")
        if self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")
        if any(size != "planned" and size < 2 for size in self.tree_nodes):
            raise ValueError(f"tree_nodes must be at least 2, got {list(self.tree_nodes)}")
        self.terms()

    def terms(self) -> RaceTerms:
        """What everybody decodes; raises UserError for settings without a race."""
        return RaceTerms(self.temperatures, self.max_new_tokens, self.rounds, seed=self.seed)

    def sizes(self) -> tuple[int | None, ...]:
        """`tree_nodes` with None for planned sizes."""
        return tuple(None if size == "planned" else size for size in self.tree_nodes)


@dataclass(frozen=True)
class EntryConfig:
    """One head: a training file and settings that override it."""

    config: str
    overrides: tuple[str, ...] = ()
    baseline: str | None = None  # the entry from which this one differs in one thing


@dataclass(frozen=True)
class Entry:
    """An entry with all settings of its training."""

    name: str
    config: Path
    settings: tuple[str, ...]  # section.key=value
    run: RunConfig
    baseline: str | None

    @property
    def folder(self) -> Path:
        """Where its head is."""
        return Path(self.run.train.output)


@dataclass(frozen=True)
class Board:
    """A whole leaderboard."""

    target: BoardTarget
    data: BoardData
    train: BoardTraining
    race: BoardRace
    entries: tuple[Entry, ...]

    @property
    def output(self) -> Path:
        """The folder of heads and results."""
        return Path(self.train.output)

    def settings(self) -> dict[str, Any]:
        """Everything that decides what is measured."""
        return {
            "target": asdict(self.target),
            "race": asdict(self.race),
            "entries": {
                entry.name: {**entry.run.settings(), "baseline": entry.baseline}
                for entry in self.entries
            },
        }


SECTIONS = {
    "target": BoardTarget, "data": BoardData, "train": BoardTraining, "race": BoardRace,
}  # fmt: skip


def load_board(path: Path, overrides: Iterable[str] = ()) -> Board:
    """Read a leaderboard's file and apply overrides such as `train.minutes=2`.

    Raises UserError that names the file or the override and the setting, also for errors in the
    training files that it names.
    """
    given = read_yaml(path)
    for override in overrides:
        given.update(read_override(override))
    names = [name for name in given if name.startswith(f"{ENTRIES}.")]
    listed = {name.removeprefix(f"{ENTRIES}."): given.pop(name) for name in names}
    if not listed:
        raise UserError(f"{path} lists no heads under {ENTRIES}:")
    check_names(given, SECTIONS)
    built = {name: build_section(name, cls, given, path) for name, cls in SECTIONS.items()}
    data, training = built["data"], built["train"]
    target = built["target"]
    entries = []
    for name, value in listed.items():
        chosen = read_entry(name, value, path)
        if chosen.baseline is not None and chosen.baseline not in listed:
            raise UserError(
                f"{path}: the baseline {chosen.baseline!r} of {name} is not an entry; entries are "
                f"{', '.join(listed)}"
            )
        entries.append(resolve(name, chosen, target, data, training))
    return Board(target, data, training, built["race"], tuple(entries))


def read_entry(name: str, value: Given, path: Path) -> EntryConfig:
    """One entry as it is in the file."""
    section = f"{ENTRIES}.{name}"
    if not isinstance(value.value, dict):
        raise UserError(f"{value.origin}: {section} must hold config:, got {value.value!r}")
    if Path(name).name != name or name.startswith("."):
        raise UserError(f"{value.origin}: {name!r} cannot be the name of a folder")
    given = {f"{section}.{key}": Given(v, value.origin) for key, v in value.value.items()}
    check_names(given, {section: EntryConfig})
    entry = build_section(section, EntryConfig, given, path)
    for override in entry.overrides:
        if (setting := override.partition("=")[0]) in SHARED:
            raise UserError(f"{value.origin}: {section} sets {setting}, which is the same for all")
    return entry


def resolve(
    name: str, entry: EntryConfig, target: BoardTarget, data: BoardData, training: BoardTraining
) -> Entry:
    """The entry's training configuration; raises UserError if it is wrong. Nothing is loaded."""
    settings = (
        f"target.name={target.name}",
        f"data.train={data.train}",
        f"data.validation={data.validation}",
        "train.epochs=null",
        "train.max_steps=null",
        f"train.max_minutes={training.minutes}",
        f"train.output={Path(training.output) / 'heads' / name}",
        *entry.overrides,
    )
    try:
        run = load_run_config(Path(entry.config), settings)
    except UserError as error:
        raise UserError(f"{ENTRIES}.{name}: {error}") from error
    return Entry(name, Path(entry.config), settings, run, entry.baseline)
