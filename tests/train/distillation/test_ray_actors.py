"""Two actors of a local Ray cluster write the rows of one process, also when one is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from distilled import asked
from tiny import target_folder, write_target

from drafthead.core.errors import UserError
from drafthead.infer import Decoder
from drafthead.train.distillation.answer_source import DecoderSource
from drafthead.train.distillation.answers import DistillReport, distill
from drafthead.train.distillation.distilled_file import DistilledFile
from drafthead.train.settings import DistillSettings

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'drafthead[ray]'")
from drafthead.train.distillation import ray_actors  # noqa: E402
from drafthead.train.distillation.ray_actors import Loading, RayActors  # noqa: E402

ROWS = 12
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two cores."""
    ray.init(num_cpus=2, log_to_driver=False)
    yield
    ray.shutdown()


target = target_folder(initializer_range=0.5)


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


@pytest.mark.thorough
@pytest.mark.usefixtures("cluster")
def test_a_run_that_was_stopped_goes_on_and_other_files_are_refused(
    target: Path, settings: DistillSettings, near: bytes, output: Path, monkeypatch
) -> None:
    append = DistilledFile.append

    def stopping(*given: object) -> None:
        append(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DistilledFile, "append", stopping)
        distil(actors_of(target), settings, output)
    assert 0 < len(output.read_bytes()) < len(near) and near.startswith(output.read_bytes())
    actors = actors_of(target)
    assert distil(actors, settings, output).already_done and output.read_bytes() == near
    write_target(target, initializer_range=0.5, seed=1)  # after the first copy was loaded
    with pytest.raises(UserError, match="has other weights than on the machine"):
        distil(actors, settings, output.with_name("other.jsonl"))


@pytest.mark.thorough
def test_a_killed_run_in_a_cluster_of_its_own_goes_on(
    target: Path, settings: DistillSettings, near: bytes, output: Path
) -> None:
    """`--ray auto` without a cluster, and kill -9 after the first rows."""
    code = f"""
import sys; sys.path[:0] = {sys.path!r}
import test_ray_actors as here
from drafthead.train.distillation import answers
from drafthead.train.settings import DistillSettings
answers.WINDOW = 1
actors = here.actors_of({str(target)!r})
here.distil(actors, DistillSettings(**{asdict(settings)!r}), here.Path({str(output)!r}))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        while process.poll() is None and not (output.exists() and output.stat().st_size):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and near != output.read_bytes()
    subprocess.run(command, env=environment, check=True)
    assert output.read_bytes() == near


@pytest.mark.usefixtures("cluster")
def test_too_many_cores_are_refused(target: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        RayActors("auto", Loading("./nowhere", "float32", "cpu", None), 1)
    with pytest.raises(UserError, match="no machine of the cluster has 3 cores"):
        actors_of(target, cores=3)


def test_an_address_without_a_cluster_is_one_sentence(target: Path, monkeypatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(UserError, match="no Ray cluster answers at nowhere"):
        ray_actors.connect("nowhere")
