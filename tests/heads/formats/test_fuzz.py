"""Seeded random damage to every format: one short sentence, or a head that decodes.

Each case copies a checkpoint and does one to three things to its files. Whatever reads it then ends
with a UserError of one line and at most 500 characters, or with a head whose greedy text is the
target's own and that `import` writes as the same head; in 10 seconds of computing, and in memory
four times the size of the files and what does not depend on it.
"""

import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged import (
    ALLOWANCE,
    APART,
    NAMES,
    OUR_BLOCK,
    Grown,
    Live,
    most_memory,
    size_of,
    target_of,
    time_limit,
    truncated,
    weights_of,
)
from safetensors.torch import load_file, save_file

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import TreeShape
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.formats import build_head, load_head, read_foreign
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.formats.drafthead import save_head
from drafthead.infer import Decoder
from drafthead.lab.reports.head import rows_of

# Numbers of cases, which are their seeds: in the default suite, and 5,000 more in pieces.
FEW = range(120)
PIECES = [range(start, start + 500) for start in range(1000, 6000, 500)]
SECONDS = 10
PROMPT, NEW = [3, 1, 4, 1, 5, 9, 2, 6], 6
NAN, INF = float("nan"), float("inf")
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 48, 63, 64, 10**9, 2**63, 10**400, 0.5, -1.5, 1e-300,
    1e300, NAN, INF, -INF, "", "x", "64", "a\0b", "\x1b[2J", "\ud800", "\u202e", "y" * 10**5, [],
    [1], [1, 1], [-1, 3], [NAN], ["x"], [[]], list(range(3000)), {}, {"x": 1},
    {"rope_type": "yarn"},
    {"full_attention": {}}, "../x", "linear", "llama3", "full_attention", "sliding_attention",
]  # fmt: skip
Damage = Callable[[Path, random.Random], None]
Tensors = dict[str, torch.Tensor]


# Damage to files


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


# Damage to JSON


def objects(value: Any) -> Iterator[dict[str, Any] | list[Any]]:
    """All objects and lists in a JSON value that are not empty."""
    inner = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list) and value:
        yield value
        for part in inner:
            yield from objects(part)


def edited(folder: Path, rng: random.Random, edit: Callable[..., None]) -> None:
    path = rng.choice(sorted(folder.glob("*.json")))
    try:
        content = json.loads(path.read_text())
    except ValueError:  # damaged before
        return
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


# Damage to tensors


def restored(folder: Path, rng: random.Random, change: Callable[[Tensors, str], None]) -> None:
    """Rewrite the weights with something done to a tensor."""
    try:
        path = weights_of(folder)
        safe = path.suffix == ".safetensors"
        tensors = load_file(path) if safe else torch.load(path, weights_only=True)
    except Exception:  # damaged before
        return
    change(tensors, rng.choice(sorted(tensors)))
    if safe:
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path)
    else:
        torch.save(tensors, path)


def lost(folder: Path, rng: random.Random) -> None:
    restored(folder, rng, lambda tensors, name: tensors.__delitem__(name))


def renamed(folder: Path, rng: random.Random) -> None:
    def change(tensors: Tensors, name: str) -> None:
        number = rng.choice(["0", "1", "7", "999", "99999999"])
        names = [name.replace("0", number), name + "\0", "z" * 9999, "d2t", "bias", "fc.bias"]
        tensors[rng.choice(names)] = tensors.pop(name)

    restored(folder, rng, change)


def repeated(folder: Path, rng: random.Random) -> None:
    """Many names for one tensor, which a pickle stores once."""

    def change(tensors: Tensors, name: str) -> None:
        for number in range(rng.choice([1, 2, 50, 400])):
            tensors[name.replace("0", str(number)) + ".x" * ("0" not in name)] = tensors[name]

    restored(folder, rng, change)


def reshaped(folder: Path, rng: random.Random) -> None:
    def change(tensors: Tensors, name: str) -> None:
        tensor = tensors[name]
        forms = [
            tensor.T, tensor[None], tensor.flatten(), tensor[:0], tensor[:-1], tensor[:1],
            torch.cat([tensor, tensor]), torch.zeros(()), torch.zeros(0, 2**40),
            torch.zeros([1] * 300),
        ]  # fmt: skip
        tensors[name] = rng.choice(forms).contiguous()

    restored(folder, rng, change)


def retyped(folder: Path, rng: random.Random) -> None:
    kinds = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool]
    kinds += [torch.complex64, torch.float8_e4m3fn]

    def change(tensors: Tensors, name: str) -> None:
        with warnings.catch_warnings():  # complex values are cut
            warnings.simplefilter("ignore")
            tensors[name] = tensors[name].to(rng.choice(kinds))

    restored(folder, rng, change)


def revalued(folder: Path, rng: random.Random) -> None:
    def change(tensors: Tensors, name: str) -> None:
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

    restored(folder, rng, change)


DAMAGE: list[Damage] = [
    cut, flipped, flipped, grown, swapped, another_value, another_value, another_value,
    a_near_value, no_key, another_key, more_keys, measured, an_index, lost, renamed, repeated,
    reshaped, retyped, revalued,
]  # fmt: skip


# What must hold


def read_by_all(folder: Path, target: Target, expected: list[int]) -> bool:
    """Read a checkpoint as the verbs do; whether it was accepted, and then decodes."""
    for read in (shown, imported, loaded):
        try:
            read(folder, target, expected)
        except UserError as error:
            message = str(error)
            assert message.isprintable() and len(message) <= 500, message
            if read is loaded:
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


def case(whole: Path, folder: Path, rng: random.Random, names: list[str]) -> str:
    """Make a damaged copy in `folder`; returns what was done to what."""
    name, kinds = rng.choice(names), rng.choices(DAMAGE, k=rng.choice([1, 1, 2, 3]))
    shutil.copytree(whole / name, folder)
    for kind in kinds:
        if kind is not measured or name in (names[-1], names[-2]):
            kind(folder, rng)
    return f"{name}, {', '.join(kind.__name__ for kind in kinds)}"


@pytest.mark.parametrize(
    "numbers", [FEW, *(pytest.param(piece, marks=pytest.mark.slow) for piece in PIECES)], ids=str
)
def test_damage_gives_a_sentence_or_a_head_that_decodes(
    numbers: range, whole: Path, tmp_path: Path
) -> None:
    target, wrong, accepted = target_of(whole), [], 0
    answer = Decoder(target)
    answer.end_ids = frozenset()
    expected = answer.generate([PROMPT], max_new_tokens=NEW).sequences[0]
    before = most_memory()
    for number in numbers:
        rng = random.Random(number)
        what = case(whole, folder := tmp_path / f"{number}", rng, [*NAMES, OUR_BLOCK])
        size = size_of(folder)
        try:
            with time_limit(SECONDS), Grown() as grown, Live() as live:
                accepted += read_by_all(folder, target, expected)
        except Exception as error:
            wrong.append(f"{number}: {what}: {error!r}"[:600])
        if live.most > 4 * size + ALLOWANCE + 2**20 or grown.most > 4 * size + APART:
            took = f"{live.most} bytes of tensors, {grown.most} in all"
            wrong.append(f"{number}: {what}: took {took} for {size}")
        shutil.rmtree(folder)
    assert not wrong, f"{len(wrong)} of {len(numbers)}:\n" + "\n".join(wrong)
    assert len(numbers) / 20 < accepted < len(numbers) / 2
    assert most_memory() - before < 2**28
