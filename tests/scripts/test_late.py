"""Starts of the command line import late what decoding seldom uses, and mean the same with it."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import new_class

import pytest
import torch
from architectures import ARCHITECTURES, tiny_model
from tiny import byte_tokenizer

from drafthead.infer import Decoder
from drafthead.scripts import late

# Parts of packages that take long to import, and that no plain decoding uses.
HEAVY = [
    *("accelerate.accelerator", "datasets", "fastapi", "matplotlib"),
    *("drafthead.heads.families.parallel", "drafthead.heads.formats.eagle3", "pandas", "peft"),
    *("scipy.optimize._optimize", "sklearn", "sympy.core", "torch._dynamo.convert_frame"),
    *("torch._inductor", "torch.distributed.checkpoint.planner", "torch.distributed.tensor._api"),
    *("torch.distributed.fsdp._fully_shard", "torchvision"),
]
GENERATE = f"""
import sys
from drafthead.scripts import cli
try:
    cli.main()
finally:
    print("imported:", *sorted({{*{HEAVY}}} & sys.modules.keys()), file=sys.stderr)
"""
# What the compiler notes of functions, what is of a class, and what comes with a late package.
USED = """
from drafthead.scripts import late
late.install()
import sys, torch
import transformers.modeling_utils
from transformers.distributed import sharding_utils as utils
from transformers.distributed import tensor_parallel
from transformers.integrations import finegrained_fp8, moe
waits = lambda name: sys.modules[name]._late_waits
assert all(map(waits, ("accelerate", "torch._dynamo", "torch.distributed.tensor")))
assert not isinstance(torch.ones(1), utils.DTensor) and waits("torch.distributed.tensor")
undecorated = torch.compiler.disable(lambda x: x + 1)
assert undecorated(1) == 2 and waits("torch._dynamo")
assert torch.compile(lambda x: undecorated(x) * 2, backend="eager")(torch.ones(1)).item() == 4
from torch._dynamo import trace_rules
loads = finegrained_fp8._load_finegrained_fp8_kernel
assert id(loads) in trace_rules._allowed_callable_ids.function_ids
assert torch.compiler.disable(abs)(-1) == 1
from torch.distributed.tensor._api import DTensor
assert utils.DTensor is DTensor and issubclass(DTensor, utils.DTensor)
assert "colwise" in tensor_parallel.ALL_PARALLEL_STYLES
import accelerate.big_modeling
assert accelerate.big_modeling is sys.modules["accelerate.big_modeling"]
assert accelerate.dispatch_model is accelerate.big_modeling.dispatch_model
assert accelerate.__version__ and not waits("accelerate")
"""


def fresh(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    """What a new process prints."""
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_generate_starts_without_what_it_does_not_use(name, tmp_path):
    """A new process decodes as this one does, and has imported nothing heavy."""
    model = tiny_model(name, {**ARCHITECTURES[name], "vocab_size": 260}).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    ended = fresh(GENERATE, "generate", "--target", tmp_path, "--prompt=a b", "--max-new-tokens=8")
    assert ended.returncode == 0, ended.stderr
    expected = Decoder.from_pretrained(tmp_path).generate("a b", max_new_tokens=8).texts[0]
    assert ended.stdout.strip() == expected.strip()
    assert ended.stderr.splitlines()[-1] == "imported:"


def test_late_modules_are_what_they_are_as_soon_as_they_are_used():
    """The compiler, tensors on several devices and accelerate, in a new process."""
    ended = fresh(USED)
    assert ended.returncode == 0, ended.stderr


def test_nothing_is_late_where_torch_is_imported_already():
    """Who imports drafthead as a library gets modules as they are."""
    before = list(sys.meta_path)
    late.install()
    assert sys.meta_path == before


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Late: `whole`, which notes what it imports, its part `whole.part`, and `user` of both."""
    folder = tmp_path / "whole"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "log = ['whole']\nfrom .part import Kind\nfrom . import on\n"
    )
    (folder / "part.py").write_text(
        "import whole\nwhole.log.append('part')\nclass Kind: ...\ndef one(): return 1\n"
    )
    (folder / "on.py").write_text("import whole\nwhole.log.append('on')\n")
    (tmp_path / "user.py").write_text("from whole import Kind\nfrom whole.part import one\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(late, "LATE", {"whole": {"Kind"}, "whole.part": {"one", "missing"}})
    monkeypatch.setattr(sys, "meta_path", [late.LateFinder(), *sys.meta_path])
    yield importlib.import_module("user")
    for name in ("user", *[name for name in sys.modules if name.partition(".")[0] == "whole"]):
        sys.modules.pop(name, None)


ORDER = ["whole", "part", "on"]


@pytest.mark.parametrize(
    "use",
    [
        lambda user: user.one(),
        lambda user: user.Kind(),
        lambda user: new_class("Sub", (user.Kind,)),
        lambda user: user.Kind | None,
        lambda user: sys.modules["whole"].log,
        lambda user: importlib.import_module("whole.on"),
    ],
    ids=["function", "instance", "subclass", "union", "attribute", "part"],
)
def test_first_use_imports_all_once_in_its_order_and_takes_its_place(package, use):
    """A package comes before its parts, whichever of them is used first."""
    assert "log" not in vars(sys.modules["whole"])
    assert not isinstance(1, package.Kind)  # nothing can be of a class to come
    assert "log" not in vars(sys.modules["whole"])
    use(package)
    whole, part = sys.modules["whole"], sys.modules["whole.part"]
    assert whole.log == ORDER
    assert package.Kind is whole.Kind is part.Kind
    assert package.one() == 1
    assert package.one is part.one


def test_names_that_a_late_module_does_not_have_are_missing(package):
    """As of any module, when they are used or at once."""
    part = sys.modules["whole.part"]
    with pytest.raises(ImportError, match="nothing"):
        from whole.part import nothing  # noqa: F401
    with pytest.raises(AttributeError, match="missing"):
        part.missing  # noqa: B018


def test_a_scan_is_kept_until_a_file_changes(tmp_path, monkeypatch):
    """And the caller may change what it gets."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, scans = tmp_path / "models", []
    folder.mkdir()
    (folder / "one.py").write_text("1")

    def scan(path: Path) -> dict[frozenset[str], set[str]]:
        scans.append(path)
        return {frozenset(["torch"]): {file.name for file in folder.iterdir()}}

    for _ in range(2):
        scanned = late.kept(scan, folder)
        scanned(folder).clear()
        assert scanned(folder / "__init__.py") == {frozenset(["torch"]): {"one.py"}}
    assert scans == [folder]
    (folder / "one.py").write_text("12")
    late.kept(scan, folder)(folder)
    assert len(scans) == 2
    for file in (tmp_path / "cache").rglob("*"):
        if file.is_file():
            file.write_text("damaged")
    assert late.kept(scan, folder)(folder) == {frozenset(["torch"]): {"one.py"}}
