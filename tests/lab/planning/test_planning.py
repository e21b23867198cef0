"""What is planned of a run is what the run has and writes.

conftest.py runs what asks for a `family` once for each head family.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from runs import run, write_inputs, write_run
from torch import nn

from drafthead.core.errors import UserError
from drafthead.lab.planning.estimate import (
    AVERAGE,
    BUFFERS,
    FEATURES,
    GRADIENTS,
    HEAD,
    LIBRARIES,
    OPTIMISER,
    TARGET,
    disk_use,
    held_memory,
    less_memory,
    set_up,
)
from drafthead.train.draft_models.student import FAMILY
from drafthead.train.learning.engines import build_accelerator
from drafthead.train.run.config import RunConfig, load_run_config
from drafthead.train.train_heads import build_trainer

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder, initializer_range=0.02)
    return folder


@pytest.fixture
def configure(inputs: Path, tmp_path: Path):
    """A run's configuration with settings of its own."""

    def configure(family: str, *overrides: str) -> RunConfig:
        path = write_run(tmp_path / "run.yaml", inputs, {"family": family}, {}, {"max_steps": 3})
        return load_run_config(path, overrides)

    return configure


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def check_held(config: RunConfig) -> None:
    """Compare what a planned step holds with a run that was set up, after its first step."""
    held = held_memory(set_up(config), 1, 0)
    trainer = build_trainer(build_accelerator(config), config, config.folder())
    trainer.runner.run(0, 0.5, trainer.order.rows_of_step(0))
    head, states = trainer.task.head, [o.optimizer.state for o in trainer.runner.optimizers]
    of_states = [
        value for state in states for values in state.values() for value in values.values()
    ]
    assert held[TARGET] == bytes_of(tensors_of(trainer.task.target.model))
    assert held[HEAD] == bytes_of(tensors_of(head))
    assert held[GRADIENTS] == bytes_of(p for p in head.parameters() if p.requires_grad)
    assert held[OPTIMISER] == bytes_of(of_states)
    average = trainer.runner.average
    assert held.get(AVERAGE, 0) == (bytes_of(tensors_of(average.head)) if average else 0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_a_step_holds_is_what_a_run_holds(
    configure, trainable_family: str, optimizer: str
) -> None:
    check_held(configure(trainable_family, f"optimizer.name={optimizer}"))


def test_a_draft_model_an_average_and_bfloat16_are_counted_too(configure) -> None:
    settings = ("train.ema=0.9", "train.mixed_precision=bf16", "target.dtype=bfloat16")
    check_held(configure(FAMILY, *settings))


def written(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("trained", ["eagle3", FAMILY])
def test_the_disk_is_what_a_run_writes(configure, tmp_path: Path, trained: str) -> None:
    settings = ("train.ema=0.9", "head.draft_vocab_size=20", "train.max_steps=1")
    setup = set_up(configure(trained, *settings))
    disk = disk_use(setup)
    output = run(tmp_path / "run.yaml", *settings)
    [state] = (output / "state").iterdir()
    tensors = 5 * len(setup.head.state_dict())  # weights, average, up to three of an optimiser
    other_files = 40_000  # the states of random numbers
    assert disk.state < written(state) < disk.state + 1000 * tensors + other_files
    head = output / "model.safetensors"
    assert disk.head < head.stat().st_size < disk.head + 1000 * tensors


def test_a_larger_micro_batch_holds_more_features_alone(configure) -> None:
    small, large = (
        held_memory(set_up(configure("eagle3", f"train.micro_batch_rows={n}")), 1, 0)
        for n in (1, 4)
    )
    assert large.pop(FEATURES) == 4 * small.pop(FEATURES) and small == large


def test_the_weights_of_the_target_are_not_needed(inputs: Path, configure, tmp_path: Path) -> None:
    whole = held_memory(set_up(configure("parallel")), 1, 0)
    for kept in (("config.json", "token*", "chat*"), ("config.json",)):
        bare = tmp_path / f"bare{len(kept)}"
        bare.mkdir()
        for path in (p for pattern in kept for p in (inputs / "target").glob(pattern)):
            (bare / path.name).write_bytes(path.read_bytes())
        setup = set_up(configure("parallel", f"target.name={bare}"))
        assert held_memory(setup, 1, 0) == whole
    assert setup.rows is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights"),
        ({"model_type": "unheard"}, "cannot read config.json"),
    ],
)
def test_a_target_whose_sizes_are_unknown_is_refused(
    inputs: Path, configure, tmp_path: Path, change: dict[str, object], named: str
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    content = json.loads((inputs / "target" / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(UserError, match=named):
        set_up(configure("medusa", f"target.name={bare}"))


@pytest.mark.parametrize(
    "settings", [("target.placement=fsdp",), ("target.dtype=int8", "train.mixed_precision=bf16")]
)
def test_a_target_in_pieces_or_in_bytes_is_refused(configure, settings: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="only targets that are whole on their device"):
        set_up(configure("medusa", *settings))


def test_settings_that_need_less_are_those_that_this_run_can_change(configure) -> None:
    settings = ("head.output=own", "optimizer.name=adamw", "train.ema=0.9")
    assert less_memory(set_up(configure("medusa", *settings))) == [
        *("train.micro_batch_rows=1", "data.max_length=32", "head.output=shared"),
        *("train.mixed_precision=bf16", "train.ema=null", "optimizer.name=muon"),
    ]


def test_what_processes_exchange_and_libraries_count(configure) -> None:
    setup = set_up(configure("medusa"))
    on_gpu, two = held_memory(setup, 1, 0), held_memory(setup, 2, 0)
    assert two == on_gpu | {BUFFERS: on_gpu[GRADIENTS]}
    assert held_memory(setup, 1, 7) == on_gpu | {LIBRARIES: 7}
