"""The run configuration: what wins over what, and what a wrong setting is told."""

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from drafthead.core.errors import UserError
from drafthead.heads.families.medusa.head import MedusaConfig
from drafthead.train.prompts.tasks import Tasks
from drafthead.train.run.config import RunConfig, load_run_config, written_override
from drafthead.train.settings import TrainConfig
from leaderboard import load_board

CONFIGS = Path(__file__).parents[3] / "configs"
YAML_FILES = sorted(CONFIGS.rglob("*.yaml"))
RUN = """
target: {name: some/model}
data: {train: train.jsonl}
train: {output: out, max_steps: 10}
"""


@pytest.fixture
def load(tmp_path: Path):
    """Loads YAML text with overrides."""

    def load_text(text: str, *overrides: str) -> RunConfig:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return load_run_config(path, overrides)

    return load_text


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_shipped_file_is_valid(path: Path):
    if path.parent.name == "accelerate":
        assert load_config_from_file(str(path)).num_processes >= 2
    elif path.parent.name == "prompts":
        assert Tasks.read(path).about_one
    elif "entries" in yaml.safe_load(path.read_text()):
        assert load_board(path).entries
    else:
        assert load_run_config(path).settings()["head"]["family"]


RUNS = [
    path
    for path in sorted(CONFIGS.glob("*.yaml"))
    if "entries" not in yaml.safe_load(path.read_text())
]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
@pytest.mark.parametrize("engine", sorted((CONFIGS / "accelerate").glob("*.yaml")), ids=str)
def test_every_shipped_run_can_be_shared_among_the_processes_of_every_engine(path, engine):
    processes = load_config_from_file(str(engine)).num_processes
    train = load_run_config(path).train
    shared = train.shared_among(processes)
    at_once = shared.micro_batch_rows * processes
    assert at_once * shared.accumulation(processes) == train.batch_rows
    assert 1 <= shared.micro_batch_rows <= train.micro_batch_rows


@pytest.mark.parametrize(
    ("rows", "at_once", "processes", "chosen"),
    [(4, 4, 2, 2), (16, 4, 2, 4), (16, 3, 1, 2), (10, 4, 2, 1), (2, 8, 2, 1), (12, 5, 3, 4)],
)
def test_rows_at_a_time_are_the_most_that_leave_none_over(rows, at_once, processes, chosen):
    train = TrainConfig("out", epochs=1, batch_rows=rows, micro_batch_rows=at_once)
    assert train.shared_among(processes).micro_batch_rows == chosen


def test_rows_that_processes_cannot_share_are_refused():
    with pytest.raises(UserError, match="3 processes cannot share equally: use a multiple of 3"):
        TrainConfig("out", epochs=1, batch_rows=4).shared_among(3)


@pytest.mark.parametrize(
    "value", ["runs/mine #2", "#1", "a: b", "no", "2", "[x]", 'it\'s "so"', "ö" * 90, " ", ""]
)
def test_a_text_is_written_as_an_override_that_reads_as_the_text(load, value: str):
    assert load(RUN, written_override("train.output", value)).train.output == value


@pytest.mark.parametrize("value", ["runs/mine #2", "# 2", "a b #c d"])
def test_an_override_has_no_comments(load, value: str):
    """Nor has a command line: a run would be written to another folder, without a word."""
    assert load(RUN, f"train.output={value}").train.output == value
    assert load(RUN, 'train.output="runs/mine"').train.output == "runs/mine"


def test_defaults_give_way_to_the_file_and_the_file_to_the_override(load):
    assert load(RUN).optimizer.lr == 1e-3
    text = RUN + "optimizer: {lr: 5.0e-4, warmup_ratio: 0.1}\n"
    assert load(text).optimizer.lr == 5e-4
    overridden = load(text, "optimizer.lr=1e-4").optimizer
    assert (overridden.lr, overridden.warmup_ratio) == (1e-4, 0.1)


def test_the_family_decides_the_heads_settings(load, trainable_family: str):
    config = load(RUN, f"head.family={trainable_family}")
    assert config.family == trainable_family
    assert config.settings()["head"]["family"] == trainable_family


def test_head_settings_reach_the_familys_dataclass(load):
    assert load(RUN, "head.num_heads=2", "head.loss=soft").head == MedusaConfig(
        num_heads=2, loss="soft"
    )


@pytest.mark.parametrize(
    ("overrides", "steps", "minutes"),
    [
        (["train.max_minutes=1.5"], None, 1.5),
        (["train.max_steps=null", "train.max_minutes=1.5"], None, 1.5),
        (["train.max_steps=3"], 3, None),
        (["train.max_minutes=null"], 10, None),
    ],
)
def test_a_duration_of_the_command_line_replaces_the_files(load, overrides, steps, minutes):
    config = load(RUN, *overrides)
    assert (config.train.max_steps, config.train.max_minutes) == (steps, minutes)


def test_two_durations_of_the_command_line_are_one_too_many(load):
    with pytest.raises(UserError, match="exactly one of epochs, max_steps and max_minutes"):
        load(RUN, "train.max_minutes=1", "train.epochs=2")


@pytest.mark.parametrize(("dtype", "chosen"), [("auto", "no"), ("bfloat16", "bf16")])
def test_auto_precision_is_that_of_the_machine_or_of_a_narrow_target(
    load, monkeypatch, dtype: str, chosen: str
):
    monkeypatch.setattr("drafthead.train.run.config.precision_here", lambda cpu: "no")
    found = load(RUN, "train.mixed_precision=auto", f"target.dtype={dtype}")
    assert found.train.mixed_precision == chosen


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optimizer.lrr=1", r"override optimizer.lrr=1: unknown .*did you mean optimizer.lr\?"),
        ("train.lr=1", r"unknown setting train.lr; did you mean optimizer.lr\?"),
        ("train.num_heads=3", r"unknown setting train.num_heads; did you mean head.num_heads\?"),
        ("head.heads=3", r"did you mean head.num_heads\?"),
        ("head.family=medussa", r"unknown head family 'medussa'; known families: .*medusa"),
        ("wrong.xyzzy=1", r"unknown setting wrong.xyzzy; known are data, head, optimizer"),
        (
            "train.max_steps=soon",
            r"train.max_steps=soon: train.max_steps must be an integer, got 'soon'",
        ),
        ("optimizer.name=sgd", r"optimizer.name must be 'adamw' or 'muon', got 'sgd'"),
        ("optimizer.lr=-1", r"optimizer.lr=-1: optimizer.lr must be above 0, got -1"),
        ("head.num_heads=0", r"head.num_heads=0: head.num_heads must be at least 1, got 0"),
        ("head.loss=sofft", r"head.loss=sofft: head.loss must be one of hard, soft, .*got 'sofft'"),
        ("train.batch_rows=0", r"train.batch_rows must be at least 1, got 0"),
        ("target.dtype=float16", r"target.dtype=float16 needs train.mixed_precision=bf16"),
        ("target.dtype=int8", r"target.dtype=int8 needs train.mixed_precision=bf16"),
        ("train.eval_every=5", r"train.eval_every needs held-out conversations"),
        ("data.validation=train.jsonl", r"data.validation is training data itself"),
        ("optimizer.lr", r"'optimizer.lr' is not a setting: write section.key=value"),
        ("optimizer.lr=[1", r"not valid YAML"),
    ],
)
def test_a_wrong_override_is_told_what_is_wrong(load, override: str, sentence: str):
    with pytest.raises(UserError, match=sentence):
        load(RUN, override)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (RUN + "optimiser: {lr: 1}\n", r"run.yaml: unknown setting optimiser.lr; .*optimizer.lr"),
        (
            RUN + "head: {family: draft_model}\noptimizer: {depth: 3}\n",
            r"unknown setting optimizer.depth; did you mean head.depth\?",
        ),
        (RUN + "optimizer: adamw\n", r"optimizer must be a section of settings, got 'adamw'"),
        ("data: {train: a}\ntrain: {output: o, max_steps: 1}\n", r"lacks target.name"),
        ("- 1\n", r"must hold sections"),
        ("a: {b: [\n", r"run.yaml is not valid YAML"),
    ],
)
def test_a_wrong_file_is_told_what_is_wrong(load, text: str, sentence: str):
    with pytest.raises(UserError, match=sentence):
        load(text)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(UserError, match="cannot read the configuration"):
        load_run_config(tmp_path / "absent.yaml")
