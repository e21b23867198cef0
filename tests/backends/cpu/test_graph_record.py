"""Graphs on the disk: another process calls them without tracing, and with its own weights."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from stages import more
from torch import nn

from drafthead.backends import fingerprint
from drafthead.backends.compiled import Compiled, Made, tell_of_each_process, with_own_code
from drafthead.backends.cpu.graph_record import GraphRecord
from drafthead.backends.cpu.recipes import UndescribedError
from drafthead.backends.cpu.substitutions import ATTENTION
from drafthead.backends.fingerprint import OURS
from drafthead.core.substitution import Substituting
from drafthead.infer import Decoder
from drafthead.infer.engine.step import StepFunction


class Scaled(nn.Module):
    """A model of one weight matrix, a constant that is folded, and a plain attribute."""

    def __init__(self, factor: int = 2):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor + self.linear.weight.sum(0)


class Scaler:
    """A function over a model, as drafters have them."""

    def __init__(self, model: nn.Module):
        self.model = model.requires_grad_(False)

    def scale(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, None, int]:
        return self.model(x)[: y.shape[0]] + y, None, 3

    def compiled(self) -> Compiled:
        made_for = torch.device("cpu"), torch.float32
        return Compiled(self.scale, *made_for, {"x": "B .", "y": "N ."}, reads=(self.model,))


X, Y = torch.arange(12.0).view(3, 4), torch.ones(2, 4)


@pytest.fixture(autouse=True)
def _no_gradients(tmp_path, monkeypatch) -> Iterator[None]:
    """As in decoding; and no graphs of other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with torch.no_grad():
        yield


@pytest.fixture
def traces(monkeypatch) -> list[None]:
    """One entry for each graph that is not taken from the disk."""
    found: list[None] = []
    compile = Compiled._compiled

    def watched(self: Compiled, *arguments) -> object:
        found.append(None)
        return compile(self, *arguments)

    monkeypatch.setattr(Compiled, "_compiled", watched)
    return found


def stored(folder: Path) -> Path:
    [path] = folder.glob("drafthead/graphs/*/*.json")
    return path


def test_a_stored_graph_computes_with_the_weights_at_hand_under_the_same_conditions(
    traces, tmp_path
) -> None:
    """The second model stands for that of another process: nothing else is shared."""
    for _ in range(2):
        own = Scaler(Scaled())
        compiled = own.compiled()
        for x, y in ((X, Y), (X[:2], Y), (torch.cat([X, X]), torch.cat([Y, Y])[:3])):
            value, nothing, number = compiled(x, y)
            torch.testing.assert_close(value, own.scale(x, y)[0])
            assert (nothing, number) == (None, 3)
        assert len(traces) == 1
        assert len(*compiled.graphs.values()) == 1
    assert stored(tmp_path)
    strided = X.t().contiguous().t()
    torch.testing.assert_close(compiled(strided, Y)[0], own.scale(strided, Y)[0])
    assert len(traces) == 2  # another layout is another graph


def with_hook() -> Scaled:
    model = Scaled()
    model.linear.register_forward_hook(lambda _module, _inputs, output: output + 1)
    return model


def with_buffer() -> Scaled:
    model = Scaled()
    model.register_buffer("more", torch.ones(1))
    return model


def test_graphs_of_another_model_or_under_other_settings_are_not_taken(caplog) -> None:
    """Nor are those of code that is unknown, such as a hook: the log says so."""
    known = Scaler(Scaled()).compiled()._key((X, Y))
    assert known == Scaler(Scaled()).compiled()._key((X[:2], Y))
    others = [Scaled(factor=3), Scaled().train(False), Scaled().double(), with_buffer()]
    keys = [Scaler(model).compiled()._key((X, Y)) for model in others]
    keys.append(Scaler(Scaled()).compiled()._key((X, Y[:1])))
    with torch.enable_grad():
        keys.append(Scaler(Scaled()).compiled()._key((X, Y)))
    assert len({known, *keys}) == 1 + len(keys)
    tell_of_each_process.cache_clear()
    with caplog.at_level(logging.INFO, "drafthead"):
        assert Scaler(with_hook()).compiled()._key((X, Y)) is None
    assert [r.message for r in caplog.records if "each process compiles" in r.message]


@pytest.mark.parametrize("damage", ["changed", more("foreign")])
def test_a_damaged_file_is_replaced_with_one_warning(damage, traces, tmp_path, caplog) -> None:
    own = Scaler(Scaled())
    own.compiled()(X, Y)
    path = stored(tmp_path)
    text = path.read_text()
    record = GraphRecord.of_text(text)
    path.write_text(
        {
            "changed": text.replace("import torch", "import toych", 1),
            "foreign": record._replace(source="raise ImportError('undefined symbol')").text(),
        }[damage]
    )
    with caplog.at_level(logging.WARNING, "drafthead"):
        for _ in range(2):
            torch.testing.assert_close(own.compiled()(X, Y)[0], own.scale(X, Y)[0])
    messages = [r.message for r in caplog.records if r.name.startswith("drafthead")]
    assert [str(path) in message for message in messages] == [True]
    assert len(traces) == 2
    assert GraphRecord.of_text(path.read_text()).inputs == record.inputs


@pytest.mark.parametrize(
    ("edited", "is_other"),
    [
        ("heads/formats/eagle3.py", False),
        ("lab/tracing.py", False),
        ("core/target/masks.py", True),  # of the pass
        ("core/sampling.py", True),
        ("backends/cpu/kernels/source/attention.h", True),
    ],
)
def test_an_edit_discards_the_graphs_that_it_may_be_part_of(edited, is_other, monkeypatch) -> None:
    def key() -> list[Any]:
        for kept in (fingerprint.source_version, fingerprint.version_of_backends):
            kept.cache_clear()
        return [fingerprint.surroundings(), fingerprint.code(StepFunction, fingerprint.as_config)]

    before, read = key(), Path.read_bytes
    more = {OURS / edited: b"# edited"}
    assert (OURS / edited).is_file()
    with monkeypatch.context() as there:
        there.setattr(Path, "read_bytes", lambda path: read(path) + more.get(path, b""))
        after = key()
    assert (after != before) == is_other
    assert key() == before


@pytest.mark.parametrize(
    "name", ["eagle3:own", *(more(f"{f}:own") for f in ("medusa", "parallel"))]
)
def test_a_key_depends_on_every_file_whose_code_is_traced(
    name, target, make_drafter, monkeypatch
) -> None:
    described: set[Path] = set()
    traced: set[Path] = set()
    sources = fingerprint.sources

    def noted(*files: Path) -> set[Path]:
        described.update(found := sources(*files))
        return found

    def trace(self: Compiled, key: str, arguments: Sequence[Any]) -> Made:
        def backend(graph: torch.fx.GraphModule, _examples: object) -> Any:
            lines = "\n".join(node.stack_trace or "" for node in graph.graph.nodes)
            traced.update(map(Path, re.findall(r'File "([^"]+)"', lines)))
            return graph.forward

        assert key is not None
        code = torch.compile(with_own_code(self.function), fullgraph=True, backend=backend)
        with self.around, Substituting(ATTENTION):
            return Made(self.function, code(*arguments))

    monkeypatch.setattr(fingerprint, "sources", noted)
    monkeypatch.setattr(Compiled, "_compiled", trace)
    monkeypatch.setattr(Compiled, "_stored", lambda *_: None)
    for kept in (fingerprint.source_version, fingerprint.version_of_backends):
        kept.cache_clear()
    compiled = target.compiled()
    drafter = make_drafter(name, compiled)
    drafter.compile(compiled)
    Decoder(compiled, drafter).generate([9, 10, 11], max_new_tokens=4, temperature=1.0)
    ours = {path for path in traced if path.is_relative_to(OURS)}
    assert OURS / "core/target/target.py" in ours
    assert ours <= described
    assert not any("formats" in path.parts for path in described)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "other",
    [
        lambda: threads(torch.get_num_threads() + 1),  # kernels are made for a number of them
        torch.enable_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.backends.mkldnn.flags(enabled=False),
        lambda: patch.object(fingerprint, "kernel_set", lambda: "another"),
    ],
    ids=["threads", "gradients", "inference mode", "autocast", "oneDNN", "kernels"],
)
def test_a_graph_for_other_surroundings_is_another(other) -> None:
    before = fingerprint.digest(fingerprint.surroundings())
    with other():
        assert fingerprint.digest(fingerprint.surroundings()) != before
    assert fingerprint.digest(fingerprint.surroundings()) == before


@pytest.mark.parametrize("change", ["class", "attribute", "shape", "type", "layout", "hook"])
def test_a_graph_of_another_model_is_another_and_of_other_numbers_the_same(change) -> None:
    def made() -> Scaled:
        return Scaled().requires_grad_(False)

    def described(model: nn.Module) -> str | None:
        try:
            return fingerprint.digest(fingerprint.described([model]))
        except UndescribedError:
            return None  # it is kept by no key

    model, before = made(), described(made())
    assert described(model) == before, "of other weights"
    assert described(model.requires_grad_(True)) == before, "nothing is trained where a graph runs"
    if change == "class":
        model.linear.__class__ = type("Other", (nn.Linear,), {"__module__": __name__})
    elif change == "attribute":
        model.factor = 3
    elif change == "shape":
        model.linear.weight = nn.Parameter(torch.zeros(5, 4))
    elif change == "type":
        model.to(torch.float64)
    elif change == "layout":
        model.linear.weight = nn.Parameter(torch.zeros(4, 4).T)
    else:
        model.linear.register_forward_hook(lambda *_: None)
    assert described(model) != before
