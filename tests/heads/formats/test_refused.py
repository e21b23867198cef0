"""What a file may claim and hold: values out of bounds, more than its size, text that hides."""

import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged import (
    APART,
    OUR_BLOCK,
    OURS,
    Grown,
    changed,
    reconfigured,
    size_of,
    target_of,
    time_limit,
    weights_of,
)
from peak_memory import PeakMemory
from safetensors.torch import save_file
from typer.testing import CliRunner

from drafthead.core.errors import UserError
from drafthead.core.printing import LONGEST_SENTENCE, printable
from drafthead.heads.formats import load_head, read_foreign
from drafthead.heads.formats.base import TargetFacts
from drafthead.heads.formats.keys import MOST_TOKENS
from drafthead.scripts.cli import build_app

SECONDS = 10
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of an example."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(whole / name, tmp_path / "head"))

    return copy


def refusal(folder: Path, whole: Path) -> str:
    """The sentence with which a checkpoint is refused by all who read it."""
    target, found = target_of(whole), []
    for facts in (TargetFacts(), TargetFacts.of(target)):
        with time_limit(SECONDS), PeakMemory() as live, pytest.raises(UserError) as caught:
            read_foreign(folder, facts)
        found.append(str(caught.value))
        assert live.peak <= 4 * size_of(folder)
    assert len(set(found)) == 1
    assert found[0].isprintable() and len(found[0]) <= 500
    return found[0]


# Bytes


def test_views_of_one_storage_count_as_often_as_they_are_named(
    copied: Callable[[str], Path], whole: Path
) -> None:
    folder, shared, bias = copied("medusa"), torch.zeros(64, 64), torch.zeros(64)
    heads = {f"{i}.0.linear.weight": shared for i in range(900)}
    heads |= {f"{i}.0.linear.bias": bias for i in range(900)}
    weights_of(folder).unlink()
    torch.save({**heads, **{f"{i}.1.weight": shared for i in range(900)}}, folder / "head.bin")
    assert "its tensors would take at least" in refusal(folder, whole)


def test_a_sparse_file_is_refused(copied: Callable[[str], Path], whole: Path) -> None:
    folder = copied("medusa")
    header = b'{"0.0.linear.weight":{"dtype":"F32","shape":[16384,16384],"data_offsets":[0,%d]}}'
    header %= 2**30
    weights_of(folder).unlink()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**30)
    with PeakMemory() as live:
        assert "is sparse: 4,096 of its 1,073,741," in refusal(folder, whole)
    assert live.peak < 2**20


def test_a_pickle_of_many_objects_is_refused_before_they_are_made(
    copied: Callable[[str], Path], whole: Path
) -> None:
    folder = copied("medusa")
    weights_of(folder).unlink()
    torch.save([{} for _ in range(200_000)], folder / "head.bin")
    assert "objects, not only tensors" in refusal(folder, whole)


def crowded_pickle(path: Path, body: bytes, data: int) -> None:
    """A pickle of a list, with `data` bytes of one tensor; `h\x01h\x02R` makes a view of it."""

    def word(text: str) -> bytes:
        return b"X" + struct.pack("<I", len(text)) + text.encode()

    storage = word("storage") + b"ctorch\nFloatStorage\n" + word("0") + word("cpu")
    view = b"((" + storage + b"J" + struct.pack("<i", data // 4) + b"tQK\0K\4\x85K\1\x85\x89"
    view += b"ccollections\nOrderedDict\n)Rtq\2"
    with zipfile.ZipFile(path, "w") as archive:
        rebuild = b"\x80\2ctorch._utils\n_rebuild_tensor_v2\nq\1"
        archive.writestr("archive/data.pkl", rebuild + view + b"](" + body + b"e.")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/data/0", bytes(data))


def crowded_header(path: Path, content: dict[str, Any]) -> None:
    header = json.dumps(content).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


VIEW, NONE = b"h\1h\2R", {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
CROWDED: dict[str, tuple[Callable[[Path], object], str]] = {
    "views": (
        lambda path: crowded_pickle(path / "head.bin", VIEW * 200_000, 2**22),
        "objects, not only tensors",
    ),
    "views, nearly too many": (
        lambda path: crowded_pickle(path / "head.bin", VIEW * 54_000, 2**22),
        "holds list, not tensors by name",
    ),
    "dictionaries": (
        lambda path: crowded_pickle(path / "head.bin", b"}" * 10**6, 2**22),
        "objects, not only tensors",
    ),
    "tensors": (
        lambda path: crowded_header(
            path / "model.safetensors", {str(n): NONE for n in range(150_000)}
        ),
        "too many for a head",
    ),
    "tensors, nearly too many": (
        lambda path: crowded_header(
            path / "model.safetensors", {str(n): NONE for n in range(23_000)}
        ),
        "no draft head",
    ),
    "dimensions": (
        lambda path: crowded_header(
            path / "model.safetensors", {"x": {**NONE, "shape": [0] * 10**6}}
        ),
        "too many for a head",
    ),
    "lists": (
        lambda path: (path / "config.json").write_text(json.dumps({"x": [[]] * 900_000})),
        "too many for a head",
    ),
    "lists, nearly too many": (
        lambda path: (path / "config.json").write_text(json.dumps({"x": [[]] * 130_000})),
        "hidden_size is missing",
    ),
}


@pytest.mark.parametrize("kind", CROWDED)
def test_what_would_fill_the_memory_is_refused_before_it_is_made(
    kind: str, copied: Callable[[str], Path]
) -> None:
    folder = copied("eagle")
    damage, complaint = CROWDED[kind]
    if "list" not in kind:
        weights_of(folder).unlink()
    damage(folder)
    size = size_of(folder)
    with time_limit(SECONDS), Grown() as grown, pytest.raises(UserError, match=complaint):
        read_foreign(folder, TargetFacts())
    assert grown.most <= 4 * size + APART


def test_a_tensor_of_many_dimensions_is_named_briefly(
    copied: Callable[[str], Path], whole: Path
) -> None:
    folder = copied("medusa")
    changed(folder, lambda t: t.update({"0.0.linear.weight": torch.zeros([1] * 20_000)}))
    assert "'0.0.linear.weight' has 20000 dimensions" in refusal(folder, whole)


# Names


@pytest.mark.parametrize("name", ["a\0b.safetensors", "x" * 5000, "a\x1b[2Jb.safetensors", "a/b"])
def test_an_index_names_files_of_its_folder(
    name: str, copied: Callable[[str], Path], whole: Path
) -> None:
    folder = copied("vllm-medusa")
    weights_of(folder).unlink()
    index = {"weight_map": {"blocks.0.layers.0.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ("xxxx" if "x" in name[0] else "index.json names") in refusal(folder, whole)


def test_text_is_escaped_and_loses_its_middle() -> None:
    assert printable("a\x1b[2J\n\u202e\ud800é") == "a\\x1b[2J\\n\\u202e\\ud800é"
    long = printable("a" * 10**6 + "\0" * 10**6)
    assert len(long) == LONGEST_SENTENCE and long.startswith("aaa") and long.endswith("\\x00")


# Values of our own configuration

NAN, INF = float("nan"), float("inf")
OWN_VALUES: list[tuple[str, Any]] = [
    *(("provenance", value) for value in ("x", 5, True, [1], INF, 2**63)),
    *(("head.rms_norm_eps", value) for value in ("x", -1, 9e18, NAN, True)),
    *(("head.taps", value) for value in ("abc", [NAN], [10**6], {})),
    *(("head.block_size", value) for value in (10**9, 0, -1, 2.5)),
    *(("head.num_layers", value) for value in (10**6, "1", None)),
    ("head.hidden_size", 10**12),
    ("head.vocab_size", 2 * MOST_TOKENS),
    ("head.rope_parameters", [1]),
    ("head.rope_parameters", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 0}),
    ("features", None),
    ("features", {"layers": "abc", "last": True, "layer_convention": "output of layer"}),
    ("target.hidden_size", "32"),
    ("target.hidden_size", -1),
    ("family", ["eagle"]),
    ("drafthead_format", 2),
]


@pytest.mark.parametrize(("key", "value"), OWN_VALUES, ids=lambda given: repr(given)[:40])
def test_our_own_configuration_has_types_and_bounds(
    key: str, value: Any, copied: Callable[[str], Path], whole: Path
) -> None:
    folder = copied(OUR_BLOCK)

    def change(config: dict[str, Any]) -> None:
        place, _, name = key.rpartition(".")
        (config[place] if place else config)[name] = value

    reconfigured(folder, change)
    sentence = refusal(folder, whole)
    assert "config.json" in sentence and key in sentence


@pytest.mark.parametrize(
    "counts",
    ['[[[0], Infinity]]', "[[[1e400], 5]]", "[[[], 100], [[1000000000], 50]]", '[["ab", 1]]',
     "[[[0], -1]]", "[[[0], 1.5]]", "[[[0]]]", "{}", "[[[-1], 3]]", '[5, 6]'],
)  # fmt: skip
def test_measured_acceptance_has_types_and_bounds(
    counts: str, copied: Callable[[str], Path], whole: Path
) -> None:
    folder = copied(OURS)
    (folder / "acceptance.json").write_text(f'{{"path_counts": {counts}}}')
    assert "acceptance.json: path_counts" in refusal(folder, whole)


# Values of other configurations


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"rope_parameters": {"full_attention": 5}}, "full_attention is 5"),
        ({"rope_parameters": {"full_attention": [1]}}, "full_attention is [1]"),
        ({"rope_parameters": [1]}, "rope_parameters is [1]"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": NAN}}, "factor is nan"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0}}, "factor is 0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, "factor is 'x'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn needs factor"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0}}, "must be below"),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4,
                }
            },
            "short_factor has 1 numbers, but must have 4",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LLAMA3},
            "rope_type is 'default' here and 'llama3' there",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "type": "yarn", "factor": 2}},
            "rope_type is 'linear' and type is 'yarn'",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_theta": 0}, "rope_theta is 10000.0 there"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 9e18}, "rms_norm_eps is 9e+18"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"vocab_size": "64"}, "vocab_size is '64'"),
        ({"vocab_size": 2**40}, "vocab_size is 1099511627776"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"eagle_aux_hidden_state_layer_ids": [1, "x"]}, "layer_ids.1 is 'x'"),
        ({"layer_types": ["full_attention", 5]}, "layer_types.1 is 5"),
        ({"base_model_name_or_path": 5}, "base_model_name_or_path is 5"),
        ({"logit_scale": 0.25}, "logit_scale is 0.25"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"layer_types": json.loads("[" * 500 + "]" * 500)}, "recursion limit"),
        ({"deep": json.loads("[" * 500 + "]" * 500)}, "deep is [["),
        ({"hidden_act": "\x1b[2J" * 999}, "hidden_act is '\\x1b[2J"),
    ],
    ids=lambda given: repr(given)[:50],
)  # fmt: skip
def test_other_configurations_have_types_and_bounds(
    keys: dict[str, Any], complaint: str, copied: Callable[[str], Path], whole: Path
) -> None:
    folder = copied("eagle3-sglang")
    reconfigured(folder, lambda config: config.update(keys))
    sentence = refusal(folder, whole)
    if keys == {"rope_theta": 0}:  # the file has another form of it, too
        complaint = "rope_theta is 0 here and 10000.0 there"
    assert complaint in sentence and "config.json" in sentence


def test_values_that_float32_cannot_hold_are_refused_without_a_target(
    copied: Callable[[str], Path], whole: Path
) -> None:
    folder = copied("eagle3-sglang")
    large = torch.full((32, 96), 1e300, dtype=torch.float64)
    changed(folder, lambda t: t.update({"fc.weight": large}))
    assert "fc.weight holds values that are not finite" in refusal(folder, whole)


# `info`


def info(folder: Path) -> str:
    found = CliRunner().invoke(build_app(words := ["head", "info", str(folder)]), words)
    assert found.exception is None, found.exception
    return found.output


def test_info_prints_no_control_sequences_and_no_markup(copied: Callable[[str], Path]) -> None:
    folder = copied(OURS)
    origin = {"note": "\x1b[2J\x1b]0;title\x07 [/red] done", "[bold": "\x9b" * 10**5}
    reconfigured(folder, lambda config: config.update(provenance=origin))
    text = info(folder)
    assert "\\x1b[2J\\x1b]0;title\\x07 [/red] done" in text and "origin [bold" in text
    assert all(line.isprintable() for line in text.splitlines())


def test_info_says_what_it_could_not_check(copied: Callable[[str], Path], whole: Path) -> None:
    assert "configuration and all tensors" in info(whole / "medusa")
    folder = copied("eagle3-sglang")

    def without_ids(config: dict[str, Any]) -> None:
        for key in ("eagle_config", "eagle_aux_hidden_state_layer_ids"):
            config.pop(key, None)

    reconfigured(folder, without_ids)
    changed(folder, lambda t: t.update({"fc.weight": t["fc.weight"][:30].clone()}))
    assert "not names, shapes and types of tensors" in info(folder)
    with pytest.raises(UserError, match="fc.weight"):
        load_head(folder, target_of(whole))


def test_a_pickle_that_torch_refuses_comes_without_torchs_advice_to_load_its_code(
    copied: Callable[[str], Path], whole: Path
) -> None:
    folder = copied("medusa")
    weights_of(folder).unlink()
    crowded_pickle(folder / "head.bin", b"}\x94", 16)  # MEMOIZE, which torch does not know
    assert refusal(folder, whole).endswith("Unsupported operand 148")


def test_rotary_keys_that_transformers_does_not_know_give_no_warning(
    copied: Callable[[str], Path], whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied("eagle3-sglang")
    picture = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    reconfigured(folder, lambda config: config["rope_parameters"].update(picture))
    load_head(folder, target_of(whole))
    own = shutil.copytree(whole / OUR_BLOCK, folder.parent / "own")
    reconfigured(own, lambda config: config["head"]["rope_parameters"].update(picture))
    load_head(own, target_of(whole))
    assert not caplog.records


def test_a_checkpoint_that_holds_nothing_else_is_still_read(
    copied: Callable[[str], Path], whole: Path
) -> None:
    """Nulls under any name are no damage."""
    folder = copied("speculators eagle3")
    extra = {"speculators_config": {"verifier": None, "x": None}, "z": None}
    reconfigured(folder, lambda config: config.update(extra))
    assert load_head(folder, target_of(whole)).depth == 5
    save_file({"weight": torch.ones(2)}, folder / "optimizer.safetensors")
    assert load_head(folder, target_of(whole)).depth == 5
