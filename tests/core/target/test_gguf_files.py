"""GGUF targets: what the file holds is what decodes, and what cannot be read is named."""

import os
import struct
from copy import deepcopy
from pathlib import Path
from shutil import copytree
from typing import Any

import gguf
import gguf_writing
import pytest
import torch
from gguf_writing import TOKENS, write_gguf
from tiny import SPECIALS, byte_tokenizer, tiny_llama, write_target
from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from drafthead.core.backend import kernel_of
from drafthead.core.errors import UserError
from drafthead.core.target import gguf_files, gguf_model, loading
from drafthead.core.target.any_target import load_decoder_only, load_target, tokenizer_named
from drafthead.core.target.block_modules import blocks_in
from drafthead.core.target.blocks import KINDS
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


def write_wide(path: Path, kind: gguf.GGMLQuantizationType) -> PreTrainedModel:
    """A Qwen2 of whole blocks whose table is its output head; returns the model."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": TOKENS, "hidden_size": 256, "intermediate_size": 256,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    config = Qwen2Config(**shape)
    keys = {
        "context_length": 64, "embedding_length": 256, "block_count": 1,
        "feed_forward_length": 256, "attention.head_count": 4, "attention.head_count_kv": 4,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }  # fmt: skip
    return write_gguf(path, Qwen2ForCausalLM(config), "qwen2", keys, kind, pre=None)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *KINDS])
def test_a_file_is_computed_in_the_type_that_is_asked_for(tmp_path, kind) -> None:
    """Inputs are rounded to eight bits where weights lie in blocks or shall do so, nowhere else."""
    path = tmp_path / "small.gguf"
    expected = write_wide(path, gguf.GGMLQuantizationType[kind])
    ids = torch.arange(40)[None]
    for dtype in ("float32", "float16", "bfloat16", "auto", "int8", "int4"):
        target = load_target(path, dtype, "cpu")
        if dtype in ("int8", "int4"):
            assert target.precision == dtype
        elif dtype == "auto" and kind in KINDS and kernel_of("in_blocks"):
            assert target.precision == kind
            products = [part for part in target.model.modules() if isinstance(part, nn.Linear)]
            assert not products and target.dtype == torch.bfloat16
        else:
            computed = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
            same = deepcopy(expected)
            for weight in same.parameters():  # and not the frequencies of positions
                weight.data = weight.data.to(computed)
            assert target.dtype == computed and not blocks_in(target.model)
            assert torch.equal(target.model(ids).logits, same(ids).logits), dtype


def test_blocks_are_numbers_of_16_bits_where_no_kernels_multiply_them(
    tmp_path, monkeypatch
) -> None:
    """What kernels compute would take many times as long by operations of torch."""
    monkeypatch.setattr(loading, "kernel_of", lambda name: None)
    write_wide(tmp_path / "small.gguf", gguf.GGMLQuantizationType.Q4_0)
    target = load_target(tmp_path / "small.gguf", "auto", "cpu")
    assert target.precision == "bfloat16" and not blocks_in(target.model)


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


def test_a_file_is_described_once_for_each_content(tmp_path) -> None:
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


def test_weights_are_those_that_the_file_holds_now(tmp_path) -> None:
    """As an archive leaves a fine-tune in the place of its base: of one size and time."""
    path = tmp_path / "small.gguf"
    write_small(path)
    before, content = load_decoder_only(path, "float32"), bytearray(path.read_bytes())
    content[-1000] ^= 1  # of some weight
    path.write_bytes(content)
    os.utime(path, (1e9, 1e9))
    after = load_decoder_only(path, "float32")
    both = (target.model.state_dict().values() for target in (before, after))
    assert [torch.equal(*pair) for pair in zip(*both, strict=True)].count(False) == 1


@pytest.mark.parametrize("software", ["transformers", "gguf", "ours"])
def test_another_reader_makes_another_description(tmp_path, monkeypatch, software) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    before = gguf_files.fingerprint(path)
    if software != "ours":
        installed = {"transformers": "1", "gguf": "1"}
        monkeypatch.setattr(gguf_files, "version", installed.get)
        before = gguf_files.fingerprint(path)
        installed[software] = "2"
    else:
        monkeypatch.setattr(gguf_files, "VERSION", gguf_files.VERSION + 1)
    assert gguf_files.fingerprint(path) != before


def test_a_description_that_fails_leaves_nothing(tmp_path, monkeypatch) -> None:
    path = tmp_path / "small.gguf"
    write_small(path)

    def fail(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_model, "tokenizer_of", fail)
    with pytest.raises(KeyboardInterrupt):
        model_folder(path)
    assert not list((tmp_path / "cache" / "drafthead" / "gguf").iterdir())


@pytest.mark.parametrize("is_there", [True, False])
def test_a_description_that_cannot_be_kept_is_an_error_unless_another_process_was_first(
    tmp_path, monkeypatch, is_there
) -> None:
    path = tmp_path / "small.gguf"
    write_small(path)

    def refuse(made: Path, folder: Path) -> None:
        if is_there:
            copytree(made, folder)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", refuse)
    if is_there:
        assert (Path(model_folder(path)) / "config.json").exists()
    else:
        with pytest.raises(OSError, match="No space left"):
            model_folder(path)


def test_without_a_cache_a_description_lasts_for_the_process(tmp_path) -> None:
    path = tmp_path / "small.gguf"
    write_small(path)
    (tmp_path / "cache").touch()
    first = model_folder(path)
    assert (Path(first) / "config.json").exists() and model_folder(path) == first


def test_a_fetched_model_is_loaded_by_its_name(tmp_path, monkeypatch) -> None:
    with pytest.raises(UserError, match="`drafthead fetch smollm2` brings it"):
        model_folder("smollm2")
    folder = tmp_path / "cache" / "drafthead" / "models" / "smollm2"
    folder.mkdir(parents=True)
    write_small(folder / "small.gguf")
    assert model_folder("smollm2") == model_folder(folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert model_folder("smollm2") == model_folder(folder), "a folder without a model"
    (tmp_path / "smollm2/config.json").touch()  # a model here goes first
    assert model_folder("smollm2") == "smollm2"


def test_other_weights_go_before_a_gguf_file(tmp_path) -> None:
    write_target(tmp_path)
    (tmp_path / "small.gguf").touch()
    assert model_folder(tmp_path) == tmp_path
    assert model_folder("owner/name") == "owner/name"


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def say(path: Path, key: bytes, value: bytes) -> None:
    """Say something more in the header: a value of a type."""
    entry = struct.pack("<Q", len(key)) + key + value
    content = path.read_bytes()
    count = struct.unpack_from("<Q", content, 16)[0]
    path.write_bytes(content[:16] + struct.pack("<Q", count + 1) + entry + content[24:])


def say_other(path: Path, key: bytes, kind: int, value: int) -> None:
    """Say a key's value of four bytes as another, of a type."""
    content = path.read_bytes()
    end = content.index(key + struct.pack("<I", NUMBER)) + len(key)
    path.write_bytes(content[:end] + struct.pack("<II", kind, value) + content[end + 8 :])


def rename(path: Path, key: bytes, other: bytes) -> None:
    assert len(key) == len(other)
    path.write_bytes(path.read_bytes().replace(key, other))


TEXT_VALUE = struct.pack("<IQ", 8, 4) + b"many"
NUMBER, FLOAT = 4, 6


def test_a_file_that_was_joined_of_parts_is_whole(tmp_path) -> None:
    path = tmp_path / "joined.gguf"
    write_small(path)
    say(path, b"split.count", struct.pack("<IH", 2, 0))  # as llama-gguf-split --merge leaves it
    assert (Path(model_folder(path)) / "config.json").exists()


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: path.unlink(), "does not exist"),
        (lambda path: path.write_bytes(b"PK\x03\x04"), "is not a GGUF file"),
        (lambda path: path.write_bytes(b""), "is not a GGUF file"),
        (lambda path: cut(path, 0.01), "not downloaded to its end"),
        (lambda path: cut(path, 0.9), "not downloaded to its end"),
        (lambda path: say(path, b"split.count", struct.pack("<IH", 2, 2)), "one of 2 parts"),
        (
            lambda path: say(path, b"general.type", struct.pack("<IQ", 8, 7) + b"adapter"),
            "holds no model but what general.type calls 'adapter'",
        ),
        (lambda path: write_small(path, arch="wavtokenizer-dec"), "wavtokenizer-dec"),
        (
            lambda path: say(path, b"general.alignment", struct.pack("<II", NUMBER, 0)),
            "general.alignment is 0, which must be a number from 1 on",
        ),
        (
            lambda path: say(path, b"general.alignment", struct.pack("<Ii", 5, -32)),
            "general.alignment is -32, which must be",
        ),
        (
            lambda path: say(path, b"general.alignment", TEXT_VALUE),
            "general.alignment is many, which must be",
        ),
        (lambda path: say(path, b"split.count", TEXT_VALUE), "split.count is many, which must be"),
        (
            lambda path: rename(path, b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"),
            "has no list tokenizer.ggml.tokens",
        ),
        (
            lambda path: say_other(path, b"llama.attention.head_count", NUMBER, 0),
            "what its keys say is no model .ZeroDivisionError: ",
        ),
        (
            lambda path: say_other(path, b"llama.embedding_length", FLOAT, 0),
            "what its keys say is no model .*'hidden_size'",
        ),
        (
            lambda path: say_other(path, b"tokenizer.ggml.eos_token_id", NUMBER, 2**31),
            "what its keys say is no model .IndexError: ",
        ),
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
        load_decoder_only(path)


def test_several_files_in_a_folder_are_refused_and_listed(tmp_path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"holds 2 GGUF files: name one of a\.gguf, b\.gguf"):
        load_decoder_only(tmp_path)


def test_info_lists_what_became_of_every_key(tmp_path, capsys, monkeypatch) -> None:
    path = tmp_path / "small.gguf"
    write_small(path)
    monkeypatch.setenv("COLUMNS", "200")
    info.main(path)
    told = [line.strip() for line in capsys.readouterr().out.splitlines()]
    becomes = {line.split()[0]: line.split(maxsplit=1)[-1] for line in told if "." in line}
    assert becomes["llama.rope.freq_base"] == becomes["tokenizer.ggml.merges"] == "is followed"
    assert becomes["general.architecture"] == "is followed"
    assert becomes["general.name"] == "changes nothing"
