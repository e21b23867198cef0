"""Graphs of one kind: as many as the layouts of arguments ask for, and called without detours."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from drafthead.backends import compiled
from drafthead.backends.compiled import Compiled, keep_compiled_code
from drafthead.backends.cpu.direct_call import OtherLayoutError, assembly, form_of
from drafthead.core.errors import UserError

SQUARE = torch.arange(16.0).view(4, 4)


@pytest.fixture
def doubled() -> Compiled:
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    made_for = torch.device("cpu"), torch.float32
    return Compiled(double, *made_for, {"x": "B ."})


def test_another_layout_gets_a_graph_of_our_making_and_the_first_stays_in_use(
    doubled, monkeypatch, caplog
) -> None:
    before = Compiled.made
    with torch.no_grad():
        for _ in range(2):
            for x in (SQUARE, SQUARE.t()):
                assert torch.equal(doubled(x), 2 * x)
        assert Compiled.made - before == len(*doubled.graphs.values()) == 2
        monkeypatch.setattr(compiled, "MOST_GRAPHS", 2)
        for _ in range(2):
            assert torch.equal(doubled(SQUARE.double()), 2 * SQUARE.double())
        assert len(*doubled.graphs.values()) == 2
    [message] = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert "double has 2 graphs for arguments of other layouts" in message


def test_a_tensor_that_is_neither_argument_nor_weight_is_named() -> None:
    class Shifted:
        shift = torch.ones(4)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.shift

    shifted = Compiled(Shifted(), torch.device("cpu"), torch.float32, {"x": "B ."})
    with torch.no_grad(), pytest.raises(UserError, match=r"reads .*shift.* no argument"):
        shifted(SQUARE)


def test_graphs_are_called_directly_under_the_conditions_that_they_were_made_under(doubled) -> None:
    """torch's own entry would run the function as it is, while it is told to."""
    with torch.no_grad():
        doubled(SQUARE)
        doubled.function = None  # what is called now can only be the graph
        with torch.compiler.set_stance("force_eager"):
            assert torch.equal(doubled(SQUARE), 2 * SQUARE)
            assert torch.equal(doubled(SQUARE[:3]), 2 * SQUARE[:3])
    [[graph]] = doubled.graphs.values()
    with pytest.raises(OtherLayoutError), torch.enable_grad():
        graph(SQUARE)


def test_values_are_put_together_from_the_outputs_of_a_graph() -> None:
    a, b, x, y = torch.arange(4.0)[:, None]
    form = form_of((b, (a, None), 7), (a, b))
    assert assembly(json.loads(json.dumps(form)))((x, y)) == (y, (x, None), 7)
    with pytest.raises(TypeError, match="cannot return list"):
        form_of([a], (a,))


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        (None, "{home}/drafthead/compiled"),
        ("torch", "{home}/drafthead/compiled"),
        ("{home}/a", "{home}/a"),
    ],
)
def test_compiled_code_is_kept_where_a_restart_leaves_it_unless_the_user_chose_a_place(
    chosen, kept, tmp_path, monkeypatch
) -> None:
    """Importing torch's tracer writes its default, a temporary folder, into the variable."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if chosen is not None:
        place = default_cache_dir() if chosen == "torch" else chosen.format(home=tmp_path)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", place)
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == kept.format(home=tmp_path)


def test_compiled_code_stays_where_torch_puts_it_if_nothing_else_can_be_written(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()


def test_threads_that_need_a_graph_at_once_make_one(doubled) -> None:
    before, start = Compiled.made, Barrier(4)

    @torch.no_grad()
    def work(_: int) -> torch.Tensor:
        start.wait()
        return doubled(SQUARE)

    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(found, 2 * SQUARE) for found in pool.map(work, range(4)))
    assert Compiled.made == before + 1


def test_a_place_for_compiled_code_that_cannot_be_written_is_refused_in_one_sentence(
    tmp_path, monkeypatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(file / "folder"))
    with pytest.raises(UserError, match=r"TORCHINDUCTOR_CACHE_DIR is .*folder.*unset it$"):
        keep_compiled_code()
