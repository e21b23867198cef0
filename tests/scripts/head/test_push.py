"""Heads on the hub: uploaded with a card, and taken by name like a folder."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from fake_hub import Hub, serving
from huggingface_hub import constants
from tiny import tiny_llama
from transformers import dynamic_module_utils
from written import random_head

from drafthead.core.target.target import Target
from drafthead.heads.formats.drafthead import save_head
from drafthead.infer import Decoder

NAME = "me/small-medusa"


class Ended(NamedTuple):
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Ended]


@pytest.fixture
def hub() -> Iterator[Hub]:
    empty = Hub()
    with serving(empty):
        yield empty


@pytest.fixture
def drafthead(drafthead, hub: Hub, tmp_path: Path, monkeypatch) -> Run:
    """The command in this process, with this hub or another and a cache of its own."""
    monkeypatch.setenv("HF_TOKEN", "hf_planted")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    def run(*arguments: str, endpoint: str = hub.url, offline: bool = False) -> Ended:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        return Ended(*drafthead(*arguments))

    return run


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A trained head's folder, with a state that is nobody's business."""
    target, folder = Target(tiny_llama()), tmp_path / "run"
    evaluation = {"anchors": 1234, "tau_chain": 2.354, "tau_tree": {"8": 2.5}}
    medusa = random_head("medusa", target, {"num_heads": 2})
    save_head(medusa, folder, target, "maker/Model-1B", {"evaluation": evaluation})
    (folder / "state").mkdir()
    (folder / "state" / "optimizer.safetensors").write_bytes(b"large")
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder


def test_a_head_that_was_pushed_is_taken_by_its_name(hub: Hub, drafthead: Run, head: Path) -> None:
    pushed = drafthead("head", "push", str(head), NAME, "--private")
    assert pushed.returncode == 0, pushed.stderr
    stored = hub.repositories[NAME]
    generate = "custom_generate/generate.py"
    assert sorted(stored) == ["README.md", "config.json", generate, "model.safetensors"]
    assert hub.private == {NAME}
    card = stored["README.md"].decode()
    front = yaml.safe_load(card.split("---")[1])
    assert (front["base_model"], front["base_model_relation"]) == ("maker/Model-1B", "adapter")
    assert front["tags"] == ["speculative-decoding", "draft-head", "medusa", "custom_generate"]
    assert f"drafthead chat --target maker/Model-1B --draft {NAME}" in card
    assert "| chain | 8 nodes |\n| --- | --- |\n| 2.35 | 2.50 |" in card
    here, there = drafthead("head", "info", str(head)), drafthead("head", "info", NAME)
    assert there.returncode == 0, there.stderr
    assert there.stdout.splitlines()[1:] == here.stdout.splitlines()[1:]
    # As on a machine whose network is gone: what was brought is there.
    assert drafthead("head", "info", NAME, offline=True).returncode == 0


def test_a_card_that_is_there_is_kept(hub: Hub, drafthead: Run, head: Path) -> None:
    (head / "README.md").write_text("mine")
    assert drafthead("head", "push", str(head), NAME).returncode == 0
    assert hub.repositories[NAME]["README.md"] == b"mine"
    assert hub.private == set()


def test_transformers_alone_decodes_with_an_uploaded_head(
    hub: Hub, drafthead: Run, head: Path, tmp_path: Path, monkeypatch
) -> None:
    """With a local folder in place of the repository: its files are those that were uploaded."""
    assert drafthead("head", "push", str(head), NAME).returncode == 0
    folder = tmp_path / "downloaded"
    for name, content in hub.repositories[NAME].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    passes, begin = [], Decoder._start
    monkeypatch.setattr(
        Decoder, "_start", lambda self, request: passes.append(self.drafter) or begin(self, request)
    )
    model, ids = tiny_llama(), torch.tensor([[3, 9, 4, 12]])
    wanted = model.generate(ids, max_new_tokens=12, do_sample=False)
    answer = model.generate(
        ids, max_new_tokens=12, do_sample=False,
        custom_generate=str(folder), trust_remote_code=True,
    )  # fmt: skip
    assert answer.tolist() == wanted.tolist()
    (drafter,) = passes
    assert type(drafter).__name__ == "MedusaDrafter"


def test_the_card_of_a_build_gets_the_repositorys_name(
    hub: Hub, drafthead: Run, head: Path
) -> None:
    (head / "README.md").write_text("--draft OWNER/model-eagle3\nmine, too")
    assert drafthead("head", "push", str(head), NAME).returncode == 0
    assert hub.repositories[NAME]["README.md"] == f"--draft {NAME}\nmine, too".encode()


def test_a_head_in_a_pickle_is_brought(hub: Hub, drafthead: Run, tmp_path: Path) -> None:
    pickled = tmp_path / "lm_head.pt"
    torch.save({"0.0.linear.weight": torch.zeros(4, 4)}, pickled)
    hub.repositories[NAME] = {"lm_head.pt": pickled.read_bytes(), "config.json": b"{}"}
    shown = drafthead("head", "info", NAME)
    assert "medusa" in shown.stdout, shown.stderr


def test_what_the_hub_lacks_or_keeps_is_one_sentence(hub: Hub, drafthead: Run) -> None:
    missing = drafthead("head", "info", "me/nothing")
    assert missing.returncode == 2
    assert "me/nothing does not exist, neither here nor on the hub" in missing.stderr
    hub.repositories["me/kept"], hub.gated = {}, True
    gated = drafthead("head", "info", "me/kept")
    assert "agree to its terms" in gated.stderr
    for answer in (missing, gated):
        assert len(answer.stderr.strip().splitlines()) == 1


def test_without_a_network_one_sentence_says_so(drafthead: Run, head: Path) -> None:
    for arguments in (("head", "info", "me/nothing"), ("head", "push", str(head), NAME)):
        failed = drafthead(*arguments, endpoint="http://127.0.0.1:9")
        assert failed.returncode == 2, failed.stderr
        assert len(failed.stderr.strip().splitlines()) == 1
