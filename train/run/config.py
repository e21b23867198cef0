"""The configuration of a training run: defaults < YAML file < `section.key=value`.

Each section is a dataclass; the head's section is the config of its family. Nothing is loaded
before the whole configuration is checked, and torch is imported after all sections but the head's
are: what is wrong is refused at once. A name unlike all of theirs may be meant for the head.
"""

import difflib
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import yaml
from pydantic import ValidationError

from drafthead.core.errors import UserError, reason_of
from drafthead.core.settings import reader, sentence
from drafthead.core.storage.names import refuse_missing_data, refuse_missing_model
from drafthead.train.settings import (
    DURATIONS,
    DataConfig,
    OptimizerConfig,
    TargetConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from drafthead.train.run.folder import Progress, RunFolder, Settings

DEFAULT_FAMILY = "medusa"
MISSPELT = 0.85  # likeness of a name and another one, as `difflib` counts it
# All but the section of the head, which depends on its family.
SECTIONS: dict[str, type] = {
    "target": TargetConfig, "data": DataConfig, "optimizer": OptimizerConfig, "train": TrainConfig,
}  # fmt: skip


@dataclass(frozen=True)
class Duration:
    """The length of training: a number of steps, or of seconds."""

    limit: float
    unit: Literal["step", "s"]

    @classmethod
    def of(cls, config: TrainConfig, num_rows: int) -> "Duration":
        """The duration of a run over `num_rows` rows."""
        if config.max_minutes is not None:
            return cls(60 * config.max_minutes, "s")
        if config.max_steps is not None:
            return cls(config.max_steps, "step")
        assert config.epochs is not None
        return cls(max(1, math.ceil(config.epochs * num_rows / config.batch_rows)), "step")

    def done(self, progress: "Progress") -> float:
        """Return how much of `limit` is used."""
        return progress.step if self.unit == "step" else progress.seconds

    def is_used(self, progress: "Progress") -> bool:
        """Tell whether training is over."""
        return self.done(progress) >= self.limit

    def share_at_next_step(self, progress: "Progress", step_seconds: float) -> float:
        """The share of the duration used when the next step, of about that length, is half done."""
        half = 0.5 if self.unit == "step" else step_seconds / 2
        return (self.done(progress) + half) / self.limit


@dataclass(frozen=True)
class RunConfig:
    """All settings of a training run."""

    target: TargetConfig
    family: str  # of the head
    head: Any  # an instance of the family's config class
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig

    def __post_init__(self) -> None:
        if self.train.mixed_precision == "no" and is_narrow(self.target.dtype):
            raise UserError(
                f"target.dtype={self.target.dtype} needs train.mixed_precision=bf16; "
                "without it the target has to be float32"
            )
        if not self.data.is_validated and self.train.eval_every is not None:
            raise UserError(
                "train.eval_every needs held-out conversations: data.validation or "
                "data.validation_share"
            )
        if self.data.validation in self.data.sources:
            raise UserError(f"data.validation is training data itself: {self.data.validation}")

    @property
    def sections(self) -> dict[str, Any]:
        """The dataclass of each section."""
        return {
            "target": self.target,
            "head": self.head,
            "data": self.data,
            "optimizer": self.optimizer,
            "train": self.train,
        }

    def settings(self) -> "Settings":
        """The resolved configuration, as a YAML or JSON file holds it."""
        written = {name: asdict(section) for name, section in self.sections.items()}
        return written | {"head": {"family": self.family, **written["head"]}}

    def folder(self) -> "RunFolder":
        """The run's folder."""
        from drafthead.train.run.folder import RunFolder

        return RunFolder(Path(self.train.output), self.settings())


@dataclass(frozen=True)
class Given:
    """A value that the user set, and where."""

    value: Any
    origin: str


def load_run_config(path: Path, overrides: Iterable[str] = (), present: bool = False) -> RunConfig:
    """Read a YAML file and apply overrides such as `optimizer.lr=1e-4`.

    With `present` the target and the data must be there. Raises UserError that names the file or
    the override, the setting, and the nearest setting that exists.
    """
    given, overridden = read_yaml(path), dict[str, Given]()
    for override in overrides:
        overridden |= read_override(override)
    durations = {f"train.{name}" for name in DURATIONS}
    if any(overridden[name].value is not None for name in durations & overridden.keys()):
        # A duration of the command line stands in place of the file's, in whichever unit.
        given = {name: value for name, value in given.items() if name not in durations}
    given |= overridden
    family = str(given.pop("head.family", Given(DEFAULT_FAMILY, "")).value)
    of_head = {name: value for name, value in given.items() if name.startswith("head.")}
    others = {name: value for name, value in given.items() if name not in of_head}
    near = (difflib.get_close_matches(name, names_in(SECTIONS), 1, MISSPELT) for name in others)
    check_names(others, SECTIONS if all(near) else all_sections(family))
    built = {name: build_section(name, cls, given, path) for name, cls in SECTIONS.items()}
    if present:
        refuse_missing(built["target"], built["data"], path)
    sections = all_sections(family)
    check_names(of_head, sections)
    built["head"] = build_section("head", sections["head"], given, path)
    built["train"] = with_precision(built["train"], built["target"])
    return RunConfig(family=family, **built)


def all_sections(family: str) -> dict[str, type]:
    """`SECTIONS` and the head's, whose class is imported."""
    from drafthead.train.run.trainables import trainable

    return SECTIONS | {"head": trainable(family).config_class}


def names_in(sections: dict[str, type]) -> list[str]:
    """The settings of sections: the fields of their dataclasses."""
    return [f"{name}.{f.name}" for name, cls in sections.items() for f in fields(cls)]


def refuse_missing(target: TargetConfig, data: DataConfig, path: Path) -> None:
    """Raise UserError where the target, or what is trained or measured on, is not there."""
    try:
        refuse_missing_model(target.name)
        for source in (*data.sources, *filter(None, [data.validation])):
            refuse_missing_data(source)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def with_precision(train: TrainConfig, target: TargetConfig) -> TrainConfig:
    """The section with `bf16` or `no` where it has `auto`; a target of 16 bits needs `bf16`."""
    if train.mixed_precision != "auto":
        return train
    chosen = "bf16" if is_narrow(target.dtype) else precision_here(train.cpu)
    return replace(train, mixed_precision=chosen)


def is_narrow(dtype: str) -> bool:
    """Whether a number type of the target computes in 16 bits."""
    from drafthead.core.target.weight_types import LOSSY

    return dtype in ("bfloat16", "float16", *LOSSY)


def read_yaml(path: Path) -> dict[str, Given]:
    """The settings in a file, by dotted name."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the configuration {path}: {reason_of(error)}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold sections such as target: and data:")
    given: dict[str, Given] = {}
    for section, values in content.items():
        if not isinstance(values, dict):
            raise UserError(f"{path}: {section} must be a section of settings, got {values!r}")
        given.update({f"{section}.{key}": Given(v, str(path)) for key, v in values.items()})
    return given


def written_override(name: str, value: str | float | None) -> str:
    """The `section.key=value` that `read_override` reads as this value, whatever a text holds."""
    return f"{name}={yaml.safe_dump(value, width=math.inf, allow_unicode=True).splitlines()[0]}"


def read_override(override: str) -> dict[str, Given]:
    """One `section.key=value` of the command line; the value is read as YAML without comments."""
    name, equals, text = override.partition("=")
    if not equals or "." not in name:
        raise UserError(
            f"{override!r} is not a setting: write section.key=value, as in train.seed=1"
        )
    try:
        value = yaml.safe_load(text)
        ends = [t.end_mark.index for t in yaml.scan(text) if t.end_mark.index > t.start_mark.index]
        if text[max(ends, default=0) :].strip():  # for YAML a comment, as after `runs/mine #2`
            value = text
    except yaml.YAMLError as error:
        raise UserError(f"the value of {override!r} is not valid YAML") from error
    return {name: Given(value, f"the override {override}")}


def check_names(given: dict[str, Given], sections: dict[str, type]) -> None:
    """Raise UserError for a setting that does not exist, with the nearest that does."""
    known = [*names_in(sections), "head.family"]
    for name, value in given.items():
        if name not in known:
            raise UserError(f"{value.origin}: unknown setting {name}; {suggestion(name, known)}")


def suggestion(name: str, known: list[str]) -> str:
    """The setting that was probably meant, or all that exist."""
    section, _, key = name.partition(".")
    same_key = [other for other in known if other.split(".")[1] == key]
    if near := same_key or difflib.get_close_matches(name, known, n=1):
        return f"did you mean {near[0]}?"
    siblings = [other for other in known if other.startswith(section + ".")]
    choices = siblings or sorted({other.split(".")[0] for other in known})
    return f"known are {', '.join(choices)}"


def build_section(name: str, cls: type, given: dict[str, Given], path: Path) -> Any:
    """The section's dataclass; raises UserError for a value that it does not accept."""
    prefix = name + "."
    values = {
        key.removeprefix(prefix): g.value for key, g in given.items() if key.startswith(prefix)
    }
    try:
        return reader(cls).validate_python(values)
    except ValidationError as error:
        raise UserError(explain(error, name, cls, given, path)) from error


def explain(
    error: ValidationError, section: str, cls: type, given: dict[str, Given], path: Path
) -> str:
    """pydantic's first error as a sentence about a setting."""
    complaint = error.errors()[0]
    reason = complaint["msg"].removeprefix("Value error, ")
    if not complaint["loc"]:
        return f"{path}: section {section}: {reason}"
    name = f"{section}.{complaint['loc'][0]}"
    if complaint["type"] == "missing":
        return f"{path} lacks {name}, which has no default"
    reason = sentence(error, get_type_hints(cls, include_extras=True))
    return f"{given[name].origin}: {section}.{reason}"


def one_line(error: Exception) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split())


def precision_here(cpu: bool) -> Literal["no", "bf16"]:
    """`bf16` on GPUs and on processors with instructions for it, else `no`; `cpu`: uses no GPU.

    Not by measuring: that could differ between the processes of a run, or from the run that it
    continues.
    """
    import torch

    from drafthead.core.target.processor import bfloat16_instructions

    on_gpu = torch.accelerator.is_available() and not cpu
    return "bf16" if on_gpu or bfloat16_instructions() else "no"
