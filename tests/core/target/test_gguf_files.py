"""GGUF targets: what the file holds is what decodes, and what cannot be read is named."""

import importlib.util
import os
import struct
from pathlib import Path

import gguf
import gguf_writing
import pytest
import torch
from gguf_writing import TOKENS, write_gguf
from tiny import SPECIALS, byte_tokenizer, tiny_llama, write_target
from transformers import PreTrainedModel

from drafthead.core.errors import UserError
from drafthead.core.target import gguf_files
from drafthead.core.target.any_target import load_decoder_only, tokenizer_named
from drafthead.core.target.gguf_files import model_folder
from drafthead.scripts.head import info

TEXT = "Größe <|user|> of 12 abacus"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_small(
    path: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32, arch: str = "llama"
) -> PreTrainedModel:
    """A small Llama with its tokenizer as a GGUF file; returns the model that it describes."""
    model = tiny_llama(vocab_size=TOKENS, rms_norm_eps=1e-6)
    config = model.config
    keys = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }  # fmt: skip
    return write_gguf(path, model, arch, keys, kind, pre=None)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_a_file_loads_as_the_model_that_it_holds(tmp_path, kind) -> None:
    path = tmp_path / "small.gguf"
    expected = write_small(path, gguf.GGMLQuantizationType[kind])
    target = load_decoder_only(path, "float32", "cpu")
    ids = torch.arange(40)[None] % target.vocab_size
    assert torch.equal(target.model(ids).logits, expected(ids).logits)
    assert load_decoder_only(tmp_path).dtype == torch.bfloat16  # the folder means its file


def test_tokens_control_tokens_and_chat_format_come_from_the_file(tmp_path) -> None:
    path = tmp_path / "small.gguf"
    write_small(path)
    tokenizer, plain = tokenizer_named(str(path)), byte_tokenizer()
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == TEXT and len(plain) in ids  # the merged token "ab"
    assert ids.count(SPECIALS.index("<|user|>")) == 1
    assert tokenizer.eos_token == "<|end|>"
    turn = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(turn, tokenize=False) == "<|user|>hi<|end|>"


def test_a_copy_is_made_once_for_each_content(tmp_path) -> None:
    path = tmp_path / "small.gguf"
    write_small(path)
    first = Path(model_folder(path))
    made = (first / "config.json").stat().st_mtime_ns
    assert model_folder(tmp_path) == first
    assert (first / "config.json").stat().st_mtime_ns == made
    write_small(path, gguf.GGMLQuantizationType.BF16)
    second = model_folder(path)
    assert second != first
    assert set(first.parent.iterdir()) == {first, second}


@pytest.mark.parametrize("place", [0, 1 << 20, 5_000_000, -1])
def test_files_that_differ_in_one_byte_are_two_whatever_their_times(tmp_path, place) -> None:
    """As an archive leaves two fine-tunes: of one name, size and time."""
    content, names = bytearray(6_000_000), ("first", "second")
    found = []
    for name in names:
        (tmp_path / name).mkdir()
        path = tmp_path / name / "model.gguf"
        path.write_bytes(content)
        os.utime(path, (1e9, 1e9))
        found.append(gguf_files.fingerprint(path))
        content[place] += 1
    assert found[0] != found[1]
    os.utime(path, (2e9, 2e9))
    assert gguf_files.fingerprint(path) == found[1], "the same content has one copy"


@pytest.mark.parametrize("software", ["transformers", "gguf", "copies"])
def test_another_reader_makes_another_copy(tmp_path, monkeypatch, software) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    before = gguf_files.fingerprint(path)
    if software == "transformers":
        monkeypatch.setattr(gguf_files.transformers, "__version__", "later")
    elif software == "gguf":
        monkeypatch.setattr(gguf_files, "version", lambda _: "later")
    else:
        monkeypatch.setattr(gguf_files, "COPY_VERSION", gguf_files.COPY_VERSION + 1)
    assert gguf_files.fingerprint(path) != before


def test_a_copy_that_fails_leaves_nothing(tmp_path, monkeypatch) -> None:
    path = tmp_path / "small.gguf"
    write_small(path)

    def fail(_file: Path, folder: Path) -> None:
        (folder / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_files, "write_copy", fail)
    with pytest.raises(KeyboardInterrupt):
        model_folder(path)
    assert not list((tmp_path / "cache" / "drafthead" / "gguf").iterdir())


def test_without_a_cache_a_copy_lasts_for_the_process(tmp_path, monkeypatch) -> None:
    path = tmp_path / "small.gguf"
    write_small(path)
    (tmp_path / "cache").touch()
    first = model_folder(path)
    assert (Path(first) / "model.safetensors").exists() and model_folder(path) == first


def test_a_fetched_model_is_loaded_by_its_name(tmp_path, monkeypatch) -> None:
    with pytest.raises(UserError, match="`drafthead fetch smollm2` brings it"):
        model_folder("smollm2")
    folder = tmp_path / "cache" / "drafthead" / "models" / "smollm2"
    folder.mkdir(parents=True)
    write_small(folder / "small.gguf")
    assert model_folder("smollm2") == model_folder(folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()  # a folder here goes first
    assert model_folder("smollm2") == "smollm2"


def test_other_weights_go_before_a_gguf_file(tmp_path) -> None:
    write_target(tmp_path)
    (tmp_path / "small.gguf").touch()
    assert model_folder(tmp_path) == tmp_path
    assert model_folder("owner/name") == "owner/name"


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def split(path: Path) -> None:
    """Say in the header that the file is one of two."""
    key = b"split.count"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IH", 2, 2)
    content = path.read_bytes()
    count = struct.unpack_from("<Q", content, 16)[0]
    path.write_bytes(content[:16] + struct.pack("<Q", count + 1) + entry + content[24:])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: path.unlink(), "does not exist"),
        (lambda path: path.write_bytes(b"PK\x03\x04"), "is not a GGUF file"),
        (lambda path: path.write_bytes(b""), "is not a GGUF file"),
        (lambda path: cut(path, 0.01), "not downloaded to its end"),
        (lambda path: cut(path, 0.9), "not downloaded to its end"),
        (split, "one of 2 parts"),
        (lambda path: write_small(path, arch="wavtokenizer-dec"), "wavtokenizer-dec"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path, damage, problem) -> None:
    path = tmp_path / "small.gguf"
    write_small(path)
    damage(path)
    with pytest.raises(UserError, match=problem) as error:
        load_decoder_only(path)
    assert str(path) in str(error.value)


def test_missing_weights_are_an_error(tmp_path, monkeypatch) -> None:
    path = tmp_path / "small.gguf"
    pieces = gguf_writing.pieces
    monkeypatch.setattr(
        gguf_writing,
        "pieces",
        lambda *of: {n: t for n, t in pieces(*of).items() if "ffn_up" not in n},
    )
    write_small(path)
    with pytest.raises(UserError, match="lacks 2 of the model's weights"):
        model_folder(path)


def test_several_files_in_a_folder_are_refused_and_listed(tmp_path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"holds 2 GGUF files: name one of a\.gguf, b\.gguf"):
        load_decoder_only(tmp_path)


def test_without_the_package_the_command_is_named(tmp_path, monkeypatch) -> None:
    path = tmp_path / "small.gguf"
    write_small(path)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "gguf" else find(n))
    with pytest.raises(UserError, match="python -m pip install gguf"):
        model_folder(path)


def test_info_lists_what_became_of_every_key(tmp_path, capsys, monkeypatch) -> None:
    path = tmp_path / "small.gguf"
    write_small(path)
    monkeypatch.setenv("COLUMNS", "200")
    info.main(path)
    told = [line.strip() for line in capsys.readouterr().out.splitlines()]
    becomes = {line.split()[0]: line.split(maxsplit=1)[-1] for line in told if "." in line}
    assert becomes["llama.rope.freq_base"] == becomes["tokenizer.ggml.merges"] == "in the copy"
    assert becomes["GGUF.version"] == "changes nothing"
    assert any("tensors, each equal to what the package gguf reads" in line for line in told)
