"""Damaged and hostile checkpoints: one sentence each, nothing executed, no memory on trust."""

import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged import (
    ALLOWANCE,
    EXAMPLES,
    NAMES,
    Live,
    changed,
    most_memory,
    reconfigured,
    size_of,
    target_of,
    time_limit,
    truncated,
    weights_of,
)
from safetensors.torch import load_file, save_file

from drafthead.core.errors import UserError
from drafthead.heads.formats import FORMATS, load_head
from drafthead.heads.formats.base import WritableFormat
from drafthead.heads.formats.checkpoint import Checkpoint, checkpoints_at

CASES = 200
SECONDS = 20  # of computing, for one checkpoint
# Tensors that a file may lack, for the target has them or they follow from others.
OPTIONAL = ("embed_tokens.weight", "input_embed_fn.weight", "t2d", "lm_head.weight", "inv_freq")
# Keys whose value the tensors contradict or the arithmetic needs.
TELLING = (
    "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "emb_dim", "n_predict", "hydra_num_heads", "hydra_num_layers",
    "draft_vocab_size", "rms_norm_eps", "num_heads", "num_blocks", "num_layers",
)  # fmt: skip


def test_there_is_an_example_of_every_format_that_is_written() -> None:
    known = {name for name, found in FORMATS.items() if isinstance(found, WritableFormat)}
    assert {example.format for example in EXAMPLES} == known - {"mtp"}  # see test_mtp.py


# Damage


def some(tensors: dict[str, torch.Tensor], rng: random.Random) -> str:
    """The name of a floating tensor that every reader needs."""
    names = sorted(name for name, t in tensors.items() if t.is_floating_point())
    return rng.choice([name for name in names if not name.endswith(OPTIONAL)])


def truncated_weights(folder: Path, rng: random.Random) -> None:
    truncated(weights_of(folder), rng)


def wrong_shape(folder: Path, rng: random.Random) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = some(tensors, rng)
        rows = tensors[name][:-1]
        more = torch.cat([tensors[name], tensors[name][:1]])
        tensors[name] = rng.choice([rows, more, tensors[name][None]]).contiguous()

    changed(folder, change)


def wrong_type(folder: Path, rng: random.Random) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = some(tensors, rng)
        kind = rng.choice([torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
        tensors[name] = tensors[name].to(kind)

    changed(folder, change)


def missing_tensor(folder: Path, rng: random.Random) -> None:
    changed(folder, lambda tensors: tensors.__delitem__(some(tensors, rng)))


def extra_tensor(folder: Path, rng: random.Random) -> None:
    name = rng.choice(["surplus.weight", "layers.7.surprise", "lm_heads.extra.weight"])
    changed(folder, lambda tensors: tensors.__setitem__(name, torch.ones(3)))


def not_finite(folder: Path, rng: random.Random) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        values = tensors[some(tensors, rng)].view(-1)
        values[rng.randrange(len(values))] = rng.choice([float("nan"), float("inf")])

    changed(folder, change)


class Code:
    """Unpickled, this would make a folder."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def pickled(folder: Path, content: object, compressed: int = zipfile.ZIP_STORED) -> None:
    """Weights as an archive of torch.save around any pickle."""
    weights_of(folder).unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", compressed) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
        archive.writestr("archive/version", "3\n")


def code_in_a_pickle(folder: Path, rng: random.Random) -> None:
    bad = Code(folder / "executed")
    pickled(folder, rng.choice([bad, {"0.0.linear.weight": bad}, [bad], {"a": {"b": bad}}]))


def huge_pickle(folder: Path, rng: random.Random) -> None:
    if rng.random() < 0.5:
        pickled(folder, {"zeros": b"\0" * 2**26}, zipfile.ZIP_DEFLATED)
        return

    class Filled:
        def __reduce__(self) -> tuple[Any, ...]:
            return bytearray, (2**34,)

    pickled(folder, {"weight": Filled()})


def huge_header(folder: Path, rng: random.Random) -> None:
    """A safetensors file that claims gigabytes, in its header or for its header."""
    weights_of(folder).unlink()
    entry = {"dtype": "F32", "shape": [2**16, 2**16], "data_offsets": [0, 2**34]}
    header = json.dumps({"0.0.linear.weight": entry}).encode()
    length = rng.choice([len(header), 2**40, 2**26])
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + header + b"\0" * 64)


def lying_config(folder: Path, rng: random.Random) -> None:
    def change(config: dict[str, Any]) -> None:
        inner = [v for v in config.values() if isinstance(v, dict)]
        places = [c for c in [config, *inner] if set(c) & set(TELLING)]
        if not places:  # a reader that counts everything has nothing to be told
            config["hidden_size"] = 48
            return
        place = rng.choice([p for p in places if set(p) & set(TELLING)])
        lies = [-1, 10**15, "many", [3], {}, 1e400, True]
        place[rng.choice(sorted(set(place) & set(TELLING)))] = rng.choice(lies)

    reconfigured(folder, change)


def broken_config(folder: Path, rng: random.Random) -> None:
    content = rng.choice(["{", "[1, 2]", '"text"', "[" * 10**5, "\0\0", '{"a": 1'])
    (folder / "config.json").write_text(content)


def link(folder: Path, rng: random.Random) -> None:
    path = rng.choice([weights_of(folder), folder / "config.json"])
    elsewhere = folder.with_name(f"{folder.name} {path.name}")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def leading_out(folder: Path, rng: random.Random) -> None:
    """An index of shards that names what is not in the folder."""
    path = weights_of(folder)
    outside = folder.with_name(f"{folder.name}{path.suffix}")
    path.rename(outside)
    names = [f"../{outside.name}", str(outside), "..", "", "gone.safetensors", 3, None]
    content: object = {"weight_map": {"fc.weight": rng.choice(names)}}
    content = rng.choice([content, content, content, {}, {"weight_map": []}])
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


KINDS = [
    truncated_weights, wrong_shape, wrong_type, missing_tensor, extra_tensor, not_finite,
    code_in_a_pickle, huge_pickle, huge_header, lying_config, broken_config, link, leading_out,
]  # fmt: skip


def test_undamaged_examples_load_within_four_times_their_size(whole: Path) -> None:
    target = target_of(whole)
    for name in NAMES:
        with Live() as live:
            load_head(whole / name, target)
        assert live.most <= 4 * size_of(whole / name), name


def test_every_damaged_checkpoint_gives_one_sentence(whole: Path, tmp_path: Path) -> None:
    """Copies of embeddings in the target's memory are allowed for, beside the file's own size."""
    target, before = target_of(whole), most_memory()
    wrong: list[str] = []
    for number in range(CASES):
        rng = random.Random(number)
        kind = KINDS[number % len(KINDS)]
        name = NAMES[(number // len(KINDS) + 7 * number) % len(NAMES)]
        folder = tmp_path / f"{number}"
        shutil.copytree(whole / name, folder)
        size = size_of(folder)
        kind(folder, rng)
        what = f"{number}: {name}, {kind.__name__}"
        with time_limit(SECONDS), Live() as live:
            try:
                load_head(folder, target)
            except UserError as error:
                if "\n" in str(error) or len(str(error)) > 500:
                    wrong.append(f"{what}: {error}")
            except Exception as error:
                wrong.append(f"{what}: {error!r}")
            else:
                wrong.append(f"{what}: accepted")
        if live.most > 4 * size + ALLOWANCE:
            wrong.append(f"{what}: took {live.most} bytes for {size}")
        if (folder / "executed").exists():
            wrong.append(f"{what}: executed")
        shutil.rmtree(folder)
    assert not wrong, "\n".join(wrong)
    assert most_memory() - before < 2**28


# One by one


def test_the_sentence_names_the_code_in_a_pickle(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "medusa", tmp_path / "head")
    code_in_a_pickle(tmp_path / "head", random.Random(0))
    with pytest.raises(UserError, match=r"pytorch_model\.bin holds code \(posix\.mkdir\)"):
        load_head(tmp_path / "head", target_of(whole))


def test_a_sharded_checkpoint_is_read(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    shutil.copytree(whole / "vllm-medusa", folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    places = {name: file for file, part in halves.items() for name in part}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    target = target_of(whole)
    one, other = load_head(folder, target), load_head(whole / "vllm-medusa", target)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


def test_a_checkpoint_may_be_a_single_file(whole: Path) -> None:
    target = target_of(whole)
    assert load_head(whole / "medusa" / "medusa_lm_head.pt", target).family == "medusa"


def test_what_nobody_knows_is_said_to_be_unknown(whole: Path, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"no draft head of a known format; known formats: .*eagle"):
        load_head(tmp_path, target_of(whole))


def test_tensors_are_known_before_they_are_loaded(whole: Path) -> None:
    checkpoint: Checkpoint = next(checkpoints_at(whole / "eagle"))
    with Live() as live:
        names = list(checkpoint.tensors)
    assert "fc.weight" in names and checkpoint.tensors["fc.weight"].shape == (32, 64)
    assert live.most <= checkpoint.size, "the file is mapped, not read"
