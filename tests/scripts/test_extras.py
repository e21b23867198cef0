"""What `pip install drafthead` brings: decoding; a verb that needs more says what to install."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tiny import write_target

from drafthead.scripts.cli import missing

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = {
    extra: [re.match(r"[\w-]+", line)[0] for line in lines if not line.startswith("drafthead")]
    for extra, lines in PROJECT["optional-dependencies"].items()
    if extra in ("train", "lab", "serve")
}
MODULES = [name.replace("-", "_") for names in EXTRAS.values() for name in names]
WITHOUT = f"""
import sys
for name in {MODULES}:
    sys.modules[name] = None  # as if it were not installed
from drafthead.scripts import cli
cli.main()
"""
# Of transformers and huggingface_hub, which bring them.
BROUGHT = {"requests", "urllib3", "filelock", "pyarrow"}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """`drafthead ...` where no extra is installed."""
    program = WITHOUT.replace(str(MODULES), str([m for m in MODULES if m not in BROUGHT]))
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_each_package_of_an_extra_is_named_with_it() -> None:
    for extra, names in EXTRAS.items():
        lines = [f'{name}>=1; extra == "{extra}"' for name in names]
        for name in names:
            error = ModuleNotFoundError("gone", name=f"{name.replace('-', '_')}.inner")
            assert missing(error, lines).endswith(f"pip install 'drafthead[{extra}]'")
    with pytest.raises(ModuleNotFoundError):
        missing(ModuleNotFoundError("gone", name="other"), lines)


def test_decoding_needs_no_extra_and_other_verbs_name_theirs(tmp_path) -> None:
    write_target(tmp_path / "target")
    target = ("--target", str(tmp_path / "target"))
    said = run("generate", *target, "--draft", "lookup", "--prompt", "hi", "--max-new-tokens", "4")
    assert said.returncode == 0, said.stderr
    refused = run("serve", *target)
    assert refused.returncode == 2 and "pip install 'drafthead[serve]'" in refused.stderr
