"""Damaged and hostile checkpoints: one sentence each, nothing executed, no memory on trust.

What always spoils a checkpoint is refused. After other damage, one to three kinds at random, a head
may still be read: its greedy text is then the target's own, and `import` writes the same head.
"""

import json
import os
import pickle
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged import (
    ALLOWANCE,
    APART,
    EXAMPLES,
    NAMES,
    OUR_BLOCK,
    Grown,
    changed,
    most_memory,
    reconfigured,
    size_of,
    target_of,
    time_limit,
    truncated,
    weights_of,
)
from peak_memory import PeakMemory
from safetensors.torch import load_file, save_file
from stages import more

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import TreeShape
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.formats import FORMATS, build_head, load_head, read_foreign
from drafthead.heads.formats.base import TargetFacts, WritableFormat
from drafthead.heads.formats.checkpoint import Checkpoint, checkpoints_at
from drafthead.heads.formats.drafthead import save_head
from drafthead.infer import Decoder
from drafthead.lab.reports.head import rows_of

CASES = range(200)  # numbers are seeds
MIXED = [more(range(120)), *(pytest.param(range(n, n + 500), marks=pytest.mark.slow)
         for n in range(1000, 6000, 500))]  # fmt: skip
SECONDS = 20  # of computing, for one checkpoint
PROMPT, NEW = [3, 1, 4, 1, 5, 9, 2, 6], 6
NAN, INF = float("nan"), float("inf")
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 48, 63, 64, 10**9, 2**63, 10**400, 0.5, -1.5, 1e-300,
    1e300, NAN, INF, -INF, "", "x", "64", "a\0b", "\x1b[2J", "\ud800", "\u202e", "y" * 10**5, [],
    [1], [1, 1], [-1, 3], [NAN], ["x"], [[]], list(range(3000)), {}, {"x": 1},
    {"rope_type": "yarn"},
    {"full_attention": {}}, "../x", "linear", "llama3", "full_attention", "sliding_attention",
]  # fmt: skip
Tensors = dict[str, torch.Tensor]
Read = Callable[[Path, Target, list[int]], None]  # raises UserError for what is refused
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


# Other damage, which may do no harm: to files


def any_file(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(folder.iterdir()))


def cut(folder: Path, rng: random.Random) -> None:
    truncated(any_file(folder, rng), rng)


def flipped(folder: Path, rng: random.Random) -> None:
    """Bits of the first or the last bytes, where headers and directories are."""
    path = any_file(folder, rng)
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 3, 20])):
        near = rng.randrange(min(len(content), rng.choice([8, 100, 2000])))
        content[rng.choice([near, len(content) - 1 - near])] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def grown(folder: Path, rng: random.Random) -> None:
    path = any_file(folder, rng)
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.choice([1, 64, 5000])))


def swapped(folder: Path, rng: random.Random) -> None:
    """A part of a file is repeated in another place."""
    path = any_file(folder, rng)
    content = bytearray(path.read_bytes())
    length = rng.randrange(1, 40)
    start, other = (rng.randrange(max(1, len(content) - length)) for _ in range(2))
    content[start : start + length] = content[other : other + length]
    path.write_bytes(content)


# To JSON


def objects(value: Any) -> Iterator[dict[str, Any] | list[Any]]:
    """All objects and lists in a JSON value that are not empty."""
    inner = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list) and value:
        yield value
        for part in inner:
            yield from objects(part)


def edited(folder: Path, rng: random.Random, edit: Callable[..., None]) -> None:
    path = rng.choice(sorted(folder.glob("*.json")))
    content = json.loads(path.read_text())
    place = rng.choice(list(objects(content)) or [{"x": 1}])
    edit(place, rng.choice(sorted(place) if isinstance(place, dict) else range(len(place))))
    path.write_text(json.dumps(content))


def another_value(folder: Path, rng: random.Random) -> None:
    edited(folder, rng, lambda place, key: place.__setitem__(key, rng.choice(VALUES)))


def a_near_value(folder: Path, rng: random.Random) -> None:
    """A number that is a little wrong."""

    def edit(place: Any, key: Any) -> None:
        if isinstance(place[key], bool):
            place[key] = not place[key]
        elif isinstance(place[key], int | float):
            place[key] = rng.choice([place[key] + 1, place[key] - 1, -place[key], 2 * place[key]])

    edited(folder, rng, edit)


def no_key(folder: Path, rng: random.Random) -> None:
    edited(folder, rng, lambda place, key: place.__delitem__(key))


def another_key(folder: Path, rng: random.Random) -> None:
    def edit(place: Any, key: Any) -> None:
        if isinstance(place, dict):
            name = rng.choice([key.upper(), key + "\0", "x" * 1000, "head_dim", "rope_scaling"])
            place[name] = place.pop(key)

    edited(folder, rng, edit)


def more_keys(folder: Path, rng: random.Random) -> None:
    names = (
        "rope_scaling", "rope_parameters", "rope_theta", "head_dim", "layer_types",
        "draft_vocab_size", "block_size", "hidden_act", "model_type", "speculators_model_type",
        "drafthead_format", "drafthead_depth", "num_hidden_layers", "tie_word_embeddings",
        "provenance",
        "family",
    )  # fmt: skip

    def edit(place: Any, _key: Any) -> None:
        if isinstance(place, dict):
            place[rng.choice(names)] = rng.choice(VALUES)

    edited(folder, rng, edit)


def measured(folder: Path, rng: random.Random) -> None:
    """Counts of paths, where only our own format has any."""
    count = rng.choice([1, 5, *VALUES])
    content = {"path_counts": [[[], 10], [[rng.choice([0, *VALUES])], count], [[0, 0], 1]]}
    (folder / "acceptance.json").write_text(json.dumps(content))


def an_index(folder: Path, rng: random.Random) -> None:
    weights = weights_of(folder)
    place = rng.choice([weights.name, *VALUES])
    names = ["fc.weight", "0.0.linear.weight", "blocks.0.layers.0.weight", "x", "\0"]
    index = {"weight_map": rng.choice([{name: place for name in names}, {names[0]: place}, place])}
    (folder / f"model{weights.suffix}.index.json").write_text(json.dumps(index))


# To tensors


def renamed(folder: Path, rng: random.Random) -> None:
    def change(tensors: Tensors) -> None:
        name = rng.choice(sorted(tensors))
        number = rng.choice(["0", "1", "7", "999", "99999999"])
        names = [name.replace("0", number), name + "\0", "z" * 9999, "d2t", "bias", "fc.bias"]
        tensors[rng.choice(names)] = tensors.pop(name)

    changed(folder, change)


def repeated(folder: Path, rng: random.Random) -> None:
    """Many names for one tensor, which a pickle stores once."""

    def change(tensors: Tensors) -> None:
        name = rng.choice(sorted(tensors))
        for number in range(rng.choice([1, 2, 50, 400])):
            tensors[name.replace("0", str(number)) + ".x" * ("0" not in name)] = tensors[name]

    changed(folder, change)


def reshaped(folder: Path, rng: random.Random) -> None:
    def change(tensors: Tensors) -> None:
        name = rng.choice(sorted(tensors))
        tensor = tensors[name]
        forms = [
            tensor.T, tensor[None], tensor.flatten(), tensor[:0], tensor[:-1], tensor[:1],
            torch.cat([tensor, tensor]), torch.zeros(()), torch.zeros(0, 2**40),
            torch.zeros([1] * 300),
        ]  # fmt: skip
        tensors[name] = rng.choice(forms).contiguous()

    changed(folder, change)


def revalued(folder: Path, rng: random.Random) -> None:
    def change(tensors: Tensors) -> None:
        name = rng.choice(sorted(tensors))
        tensor = tensors[name].clone()
        if not tensor.numel():
            return
        if tensor.is_floating_point():
            tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice([NAN, INF, -INF, 1e9, 3e38])
        elif tensor.dtype == torch.bool:
            tensor.view(-1)[rng.randrange(tensor.numel())] ^= True
        else:
            tensor.view(-1)[rng.randrange(tensor.numel())] += rng.choice([1, -1, 100])
        tensors[name] = tensor

    changed(folder, change)


KINDS = [
    truncated_weights, wrong_shape, wrong_type, missing_tensor, extra_tensor, not_finite,
    code_in_a_pickle, huge_pickle, huge_header, lying_config, broken_config, link, leading_out,
]  # fmt: skip
MIXED_KINDS = [
    *KINDS[:6], cut, flipped, flipped, grown, swapped, another_value, another_value, another_value,
    a_near_value, no_key, another_key, more_keys, measured, an_index, renamed, repeated, reshaped,
    revalued,
]  # fmt: skip


# What must hold


def is_taken(ways: Sequence[Read], folder: Path, target: Target, expected: list[int]) -> bool:
    """Whether the last of some ways to read a checkpoint takes it; what is not taken is told."""
    for read in ways:
        try:
            read(folder, target, expected)
        except UserError as error:
            message = str(error)
            assert message.isprintable() and len(message) <= 500, message
            if read is ways[-1]:
                return False
    return True


def shown(folder: Path, target: Target, expected: list[int]) -> None:
    """What `info` does."""
    known, foreign = read_foreign(folder, TargetFacts())
    if not foreign.needs_target:
        build_head(foreign, folder)
    assert all(text.isprintable() for row in rows_of(known, foreign) for text in row)


def imported(folder: Path, target: Target, expected: list[int]) -> None:
    """What `import` does, and whether the file that it writes is read as the same head."""
    _, foreign = read_foreign(folder, TargetFacts.of(target))
    head, output = build_head(foreign, folder, target), folder / "imported"
    facts = TargetFacts.of(target).completed(foreign.target)
    save_head(head, output, facts, facts.name, foreign.provenance, dtype=None)
    again = load_head(output, target)
    shutil.rmtree(output)
    assert again.config == head.config
    ours = head.to(target.dtype).state_dict()
    assert all(torch.equal(ours[name], t) for name, t in again.state_dict().items())


def loaded(folder: Path, target: Target, expected: list[int]) -> None:
    """Load and decode greedily: a damaged head may draft badly, but the text is the target's."""
    head = load_head(folder, target)
    shape = None if head.path_counts else TreeShape.chain(head.depth)
    drafter = drafter_for(head, target, shape)
    decoder = Decoder(target, drafter, drafter.budgets[-1])
    decoder.end_ids = frozenset()
    assert decoder.generate([PROMPT], max_new_tokens=NEW).sequences[0] == expected


def only_loaded(folder: Path, target: Target, expected: list[int]) -> None:
    """A head, of which nothing more is asked."""
    load_head(folder, target)


def wrong_with(
    ways: Sequence[Read], folder: Path, target: Target, expected: list[int]
) -> tuple[str, bool]:
    """What is wrong with how a damaged checkpoint is read, if anything, and whether it is taken.

    Copies of embeddings in the target's memory are allowed for, beside the file's own size.
    """
    size, taken, wrong = size_of(folder), False, ""
    try:
        with time_limit(SECONDS), Grown() as grown, PeakMemory() as live:
            taken = is_taken(ways, folder, target, expected)
    except Exception as error:
        wrong = f"{error!r}"[:600]
    if live.peak > 4 * size + ALLOWANCE + 2**20 or grown.most > 4 * size + APART:
        wrong += f" took {live.peak} bytes of tensors, {grown.most} in all, for {size}"
    return wrong, taken


def test_undamaged_examples_load_within_four_times_their_size(whole: Path) -> None:
    target = target_of(whole)
    for name in NAMES:
        with PeakMemory() as live:
            load_head(whole / name, target)
        assert live.peak <= 4 * size_of(whole / name), name


def test_every_damaged_checkpoint_gives_one_sentence(whole: Path, tmp_path: Path) -> None:
    target, before = target_of(whole), most_memory()
    wrong: list[str] = []
    for number in CASES:
        rng = random.Random(number)
        kind = KINDS[number % len(KINDS)]
        name = NAMES[(number // len(KINDS) + 7 * number) % len(NAMES)]
        folder = tmp_path / f"{number}"
        shutil.copytree(whole / name, folder)
        kind(folder, rng)
        fault, taken = wrong_with([only_loaded], folder, target, [])
        fault += " accepted" * taken + " executed" * (folder / "executed").exists()
        wrong += [f"{number}: {name}, {kind.__name__}: {fault}"] if fault else []
        shutil.rmtree(folder)
    assert not wrong, "\n".join(wrong)
    assert most_memory() - before < 2**28


@pytest.mark.parametrize("numbers", MIXED, ids=str)
def test_mixed_damage_gives_a_sentence_or_a_head_that_decodes(
    numbers: range, whole: Path, tmp_path: Path
) -> None:
    target, wrong, accepted = target_of(whole), list[str](), 0
    answer = Decoder(target)
    answer.end_ids = frozenset()
    expected = answer.generate([PROMPT], max_new_tokens=NEW).sequences[0]
    before, names = most_memory(), [*NAMES, OUR_BLOCK]
    for number in numbers:
        rng, folder = random.Random(number), tmp_path / f"{number}"
        name, kinds = rng.choice(names), rng.choices(MIXED_KINDS, k=rng.choice([1, 1, 2, 3]))
        shutil.copytree(whole / name, folder)
        for kind in kinds:
            if kind is not measured or name in names[-2:]:
                with suppress(Exception):  # what was damaged before cannot always be changed again
                    kind(folder, rng)
        fault, taken = wrong_with([shown, imported, loaded], folder, target, expected)
        what = f"{number}: {name}, {', '.join(kind.__name__ for kind in kinds)}: {fault}"
        wrong, accepted = wrong + [what] * bool(fault), accepted + taken
        shutil.rmtree(folder)
    assert not wrong, f"{len(wrong)} of {len(numbers)}:\n" + "\n".join(wrong)
    assert len(numbers) / 20 < accepted < len(numbers) / 2
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
    with PeakMemory() as live:
        names = list(checkpoint.tensors)
    assert "fc.weight" in names and checkpoint.tensors["fc.weight"].shape == (32, 64)
    assert live.peak <= checkpoint.size, "the file is mapped, not read"
