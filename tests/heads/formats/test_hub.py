"""Files in the hub's cache: links of a snapshot lead to its repository's files, and no further."""

import tomllib
from pathlib import Path

import pytest

from drafthead.core.errors import UserError
from drafthead.core.storage.names import SHIPPED_HEADS, may_be_hub_id
from drafthead.heads.formats.checkpoint import local_copy
from drafthead.heads.formats.files import behind_hub_link, read_json

ROOT = Path(__file__).parents[3]
CONTENT = '{"found": true}'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The place of a file in a snapshot; the content is a blob, and a file beside the cache."""
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "12"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "34").write_text(CONTENT)
    (tmp_path / "secret").write_text(CONTENT)
    return snapshot / "config.json"


def test_a_link_to_a_file_of_its_repository_is_followed(config: Path) -> None:
    config.symlink_to("../../blobs/34")
    assert behind_hub_link(config) == config.parents[2] / "blobs" / "34"
    assert read_json(config) == {"found": True}


def test_so_it_is_from_within_the_snapshot(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.symlink_to("../../blobs/34")
    monkeypatch.chdir(config.parent)
    assert read_json(Path("config.json")) == {"found": True}


@pytest.mark.parametrize("leads_to", ["../../../secret", "../../blobs/../../secret", "34"])
def test_other_links_are_refused(config: Path, leads_to: str) -> None:
    config.symlink_to(leads_to)
    with pytest.raises(UserError, match="is a link"):
        read_json(config)


def test_so_are_blobs_that_are_links(config: Path) -> None:
    (config.parents[2] / "blobs" / "56").symlink_to("../../secret")
    config.symlink_to("../../blobs/56")
    with pytest.raises(UserError, match="is a link"):
        read_json(config)


def test_links_elsewhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "34").write_text(CONTENT)
    (tmp_path / "config.json").symlink_to("blobs/34")
    with pytest.raises(UserError, match="is a link"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owner/name", True),
        ("name", False),
        ("a/b/c", False),
        ("/owner/name", False),
        ("./name", False),
        ("~/name", False),
        (".", False),
        ("here/name", False),  # a misspelt folder in one that is here
    ],
)
def test_what_may_be_on_the_hub(
    name: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert may_be_hub_id(Path(name)) == expected


@pytest.mark.parametrize("name", SHIPPED_HEADS)
def test_a_shipped_head_is_found_anywhere_by_its_name(name: str, tmp_path, monkeypatch) -> None:
    """In a clone and in a wheel; a folder of that name takes precedence."""
    monkeypatch.chdir(tmp_path)
    assert read_json(local_copy(Path(name)) / "config.json")["target"]["name"]
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert f"{SHIPPED_HEADS[name]}/*" in setup["package-data"]["drafthead.assets"]
    (tmp_path / name).mkdir()
    assert local_copy(Path(name)) == Path(name)
