"""Engines that share a run: the one asked for or an error, and one rule of number types.

Tests with DeepSpeed run where it is installed: `pip install drafthead[deepspeed]`.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import DistributedType
from runs import evaluations
from safetensors.torch import load_file
from tiny import tiny_llama, write_conversations, write_target

from drafthead.core.errors import UserError
from drafthead.core.target.features import Features
from drafthead.core.target.target import Target
from drafthead.heads.base import DraftHead
from drafthead.heads.objectives.batch import HeadBatch
from drafthead.train.data.packing import collate
from drafthead.train.data.sequences import TokenSequence
from drafthead.train.features.reading import read_features
from drafthead.train.learning.engines import build_accelerator, check_engine
from drafthead.train.learning.step import LossModule
from drafthead.train.run.config import load_run_config
from drafthead.train.run.trainables import new_head, trainable
from drafthead.train.train_heads import train

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
ROOT = Path(__file__).parents[3]
FSDP_ON_CPUS = ROOT / "tests/train/fsdp_on_cpus.py"
ALL_FAMILIES = ROOT / "tests/train/all_families.py"
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps on a target that is stored in float32."""
    folder = tmp_path_factory.mktemp("run")
    write_target(folder / "target", max_position_embeddings=128, initializer_range=0.02)
    write_conversations(folder / "train.jsonl", 20, seed=0)
    content = {
        "target": {"name": str(folder / "target")},
        "data": {"train": str(folder / "train.jsonl"), "max_length": 64},
        "optimizer": {"name": "adamw", "lr": 3e-3, "schedule": "constant", "warmup_ratio": 0.0},
        "train": {"output": "", "max_steps": 6, "batch_rows": 4, "micro_batch_rows": 1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    return folder / "run.yaml"


def test_an_engine_that_accelerate_does_not_take_is_an_error(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate takes FSDP on GPUs only, and trains without it, silently."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="asked for FSDP, and accelerate took NO: .*cpu2.yaml"):
        build_accelerator(load_run_config(config, [f"train.output={tmp_path}", "train.cpu=true"]))


def test_the_engine_that_was_asked_for_is_no_error() -> None:
    check_engine(DistributedType.DEEPSPEED, DistributedType.DEEPSPEED)
    check_engine(None, DistributedType.MULTI_CPU)


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is installed"
)
def test_deepspeed_that_is_not_installed_is_one_sentence(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(UserError, match=r"DeepSpeed, which is not installed: pip install"):
        build_accelerator(load_run_config(config, [f"train.output={tmp_path}"]))


def test_muon_is_refused_before_an_engine_starts(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="Muon needs whole matrices"):
        build_accelerator(load_run_config(config, ["train.output=x", "optimizer.name=muon"]))


def as_deepspeed(head: DraftHead, batch: HeadBatch) -> tuple[DraftHead, HeadBatch]:
    """DeepSpeed casts the weights of what it trains, and nothing else."""
    return head.bfloat16(), batch


def as_fsdp(head: DraftHead, batch: HeadBatch) -> tuple[DraftHead, HeadBatch]:
    """FSDP casts the inputs as well."""
    read = batch.features
    last = None if read.last is None else read.last.bfloat16()
    cast = Features(last, tuple(tap.bfloat16() for tap in read.taps))
    return head.bfloat16(), HeadBatch(batch.input_ids, batch.segments, batch.supervised, cast)


@pytest.mark.parametrize("engine", [as_deepspeed, as_fsdp])
def test_bf16_training_takes_a_target_stored_in_float32_under_every_engine(
    trainable_family: str, engine
) -> None:
    target = Target(tiny_llama(vocab_size=200, initializer_range=0.05))
    torch.manual_seed(0)
    counts = torch.ones(200, dtype=torch.long)
    config = trainable(trainable_family).config_class()
    head = new_head(trainable_family, config, target, counts)
    ids = torch.arange(4, 30, dtype=torch.int32)
    tokens = collate([[TokenSequence(ids, ids >= 8)]])
    batch = read_features(target, tokens, head.features_needed, "bf16")
    torch.manual_seed(0)
    expected, _ = LossModule(head, target, "bf16")(batch)
    head, batch = engine(head, batch)
    torch.manual_seed(0)
    total, _ = LossModule(head, target, "bf16")(batch)
    total.backward()
    assert total.item() == pytest.approx(expected.item(), rel=0.02)


def launch(engine: str, entry: Path, *arguments: str) -> str:
    """Run a script in another process, or in two under an engine; gives what it says."""
    launcher = ["-m", "accelerate.commands.launch", "--main_process_port", "0", "--config_file"]
    launcher = [*launcher, str(ROOT / f"configs/accelerate/{engine}.yaml")] if engine else []
    process = subprocess.run(
        [sys.executable, *launcher, str(entry), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return process.stderr


def logged(folder: Path, *names: str) -> list[float]:
    """Numbers of a run, by step: losses, and the sizes of gradients."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [record[name] for name in names or ("loss", "grad_norm") for record in records]


def losses(folder: Path) -> list[float]:
    """The losses of a run, by step."""
    return logged(folder, "loss")


def trained(config: Path, output: Path, *settings: str, engine: str = "") -> list[float]:
    """The losses of a run in another process, or in two under an engine."""
    entry = FSDP_ON_CPUS if engine == "fsdp2" else ROOT / "train/train_heads.py"
    said = launch(engine, entry, "--config", str(config), f"train.output={output}", *settings)
    print(said, file=sys.stderr)
    return losses(output)


@pytest.fixture(scope="module")
def runs(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By engine ("" is one process): a folder with a run of each family.

    Runs of an engine stop after two steps of four, and other processes go on with them.
    """

    @cache
    def of(engine: str) -> Path:
        folder = tmp_path_factory.mktemp("families")
        settings = ["--fsdp"] if engine == "fsdp2" else []
        for steps in (2, 4) if engine else (4,):
            launch(
                engine,
                ALL_FAMILIES,
                str(config),
                str(folder),
                f"train.max_steps={steps}",
                *settings,
            )
        return folder

    return of


# What the states of a run hold under each engine and under no other.
TRACES = {
    "cpu2": "optimizer.bin",
    "fsdp2": "*_fsdp_*/*",
    "zero2": "pytorch_model/*",
    "zero3": "pytorch_model/*",
}


@pytest.mark.parametrize(
    "engine",
    [
        "cpu2",
        "fsdp2",
        pytest.param("zero2", marks=needs_deepspeed),
        pytest.param("zero3", marks=needs_deepspeed),
    ],
)
def test_engines_learn_what_one_process_learns_and_resume(
    engine: str, trainable_family: str, runs: Callable[[str], Path]
) -> None:
    folders = [runs(name) / trainable_family for name in ("", engine)]
    alone, together = map(losses, folders)
    assert together == pytest.approx(alone, abs=1e-5)
    states = folders[1] / "state" / "step-000000004"
    assert list(states.glob(TRACES[engine])), f"another engine: {list(states.iterdir())}"
    one, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert set(one) == set(other)
    for name, weight in one.items():
        # Draft models are stored in bfloat16, of which neighbours may be chosen.
        close = 2**-7 if weight.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(other[name], weight, atol=1e-5, rtol=close)


@pytest.mark.parametrize("engine", ["cpu2", "fsdp2"])
def test_heads_learn_the_same_from_a_target_in_pieces(
    config: Path, tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where one process finds the features of its rows on disk and the other does not, and
    where one has fewer held-out rows.

    One process goes on after 3 steps of 2 micro-batches, of which it accumulates 4: 6 is in the
    middle of a step.
    """
    features, held_out = tmp_path / "features", tmp_path / "held_out.jsonl"
    write_conversations(held_out, 5, seed=1)
    settings = (
        f"data.validation={held_out}",
        "train.eval_every=3",
        f"data.feature_folder={features}",
    )
    folders = [tmp_path / "alone", tmp_path / engine]
    outputs = [f"train.output={folder}" for folder in folders]
    assert train(load_run_config(config, [outputs[0], *settings]))
    for row in features.glob("*/row-*[02468].safetensors"):
        row.unlink()
    some = ("train.max_steps=3",) if engine == "cpu2" else ()
    begun = trained(config, folders[1], *settings, *some, "target.placement=fsdp", engine=engine)
    if some:
        assert train(load_run_config(config, [outputs[1], *settings]))
    alone, together = map(logged, folders)
    assert together == pytest.approx(alone, abs=1e-5) and losses(folders[1])[:3] == begun[:3]
    assert evaluations(folders[0]) == evaluations(folders[1])
    held = re.search(r"process holds (\S+) of the target's (\S+) GB", capsys.readouterr().err)
    assert held and float(held[1]) < 0.8 * float(held[2]), "embeddings are whole, layers half"


@needs_deepspeed
@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_deepspeed_trains_in_bfloat16_on_a_target_stored_in_float32(
    config: Path, tmp_path: Path, engine: str
) -> None:
    together = trained(config, tmp_path / engine, "train.mixed_precision=bf16", engine=engine)
    alone = trained(config, tmp_path / "alone", "train.mixed_precision=bf16")
    assert together == pytest.approx(alone, rel=0.02)
