"""Two actors of a local Ray cluster write the rows of one process, also when one is killed."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from distilled import asked
from tiny import write_target

from drafthead.core.errors import UserError
from drafthead.infer import Decoder
from drafthead.train.distillation.answer_source import DecoderSource
from drafthead.train.distillation.answers import DistillReport, distill
from drafthead.train.distillation.distilled_file import DistilledFile
from drafthead.train.settings import DistillSettings

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'drafthead[ray]'")
from drafthead.train.distillation.ray_actors import Loading, RayActors  # noqa: E402

ROWS = 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two cores."""
    ray.init(num_cpus=2, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, initializer_range=0.5)
    return folder


@pytest.fixture(scope="module")
def settings(target: Path) -> DistillSettings:
    return DistillSettings(
        str(target), "prompts.jsonl", dtype="float32", max_new_tokens=12, batch_size=2,
        temperature=1.0, seed=4,
    )  # fmt: skip


@pytest.fixture
def near(target: Path, settings: DistillSettings, tmp_path: Path, one_batch_in_a_window) -> bytes:
    """What one process writes."""
    source = DecoderSource(Decoder.from_pretrained(target, dtype="float32", device="cpu"))
    with DistilledFile(tmp_path / "near.jsonl", settings) as file:
        distill(source, asked(ROWS, turns=2), file)
    return (tmp_path / "near.jsonl").read_bytes()


def actors_of(target: Path, cores: int = 1) -> RayActors:
    return RayActors("auto", Loading(str(target), "float32", "cpu", None), cores)


def distil(actors: RayActors, settings: DistillSettings, output: Path) -> DistillReport:
    with DistilledFile(output, settings) as file:
        return distill(actors, asked(ROWS, turns=2), file)


def answering() -> list[int]:
    """The processes of actors that have loaded a copy."""
    return [one.pid for one in psutil.process_iter(["cmdline"])
            if "ray::MapWorker(Map(Actor))" in " ".join(one.info["cmdline"] or ())]  # fmt: skip


@pytest.mark.usefixtures("cluster")
def test_rows_are_those_of_one_process_also_when_an_actor_is_killed(
    target: Path, settings: DistillSettings, near: bytes, output: Path, monkeypatch
) -> None:
    actors, append, pids = actors_of(target), DistilledFile.append, list[int]()
    assert actors.count == 2

    def killing(*given: object) -> None:
        """Write; after the first window one actor is killed."""
        append(*given)
        if not pids:
            pids.extend(answering())
            os.kill(pids[0], signal.SIGKILL)

    monkeypatch.setattr(DistilledFile, "append", killing)
    report = distil(actors, settings, output)
    assert output.read_bytes() == near and report.written == ROWS
    assert len(pids) == 2
