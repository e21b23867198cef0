"""What `pip install drafthead` brings: decoding; a verb that needs more says what to install."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tiny import write_target

from drafthead.scripts.cli import missing

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
PACKAGES = {
    extra: [re.match(r"[\w-]+", line)[0] for line in lines if not line.startswith("drafthead")]
    for extra, lines in PROJECT["optional-dependencies"].items()
    if extra in ("train", "lab", "serve")
}
# huggingface_hub and transformers bring these, whatever is asked for.
BROUGHT = {"requests", "urllib3", "pyarrow"}
RUN = """
import json, sys
modules, *commands = json.loads(sys.argv[1])
for name in modules:
    sys.modules[name] = None  # as if it were not installed
from drafthead.scripts import cli
for words in commands:
    sys.argv = ["drafthead", *words]
    try: cli.main()
    except SystemExit as stop: print("status", stop.code or 0, flush=True)
"""


def test_each_package_of_an_extra_is_named_with_it() -> None:
    for extra, names in PACKAGES.items():
        lines = [f'{name}>=1; extra == "{extra}"' for name in names]
        for name in names:
            error = ModuleNotFoundError("gone", name=f"{name.replace('-', '_')}.inner")
            assert missing(error, lines).endswith(f"pip install 'drafthead[{extra}]'")
    with pytest.raises(ModuleNotFoundError):
        missing(ModuleNotFoundError("gone", name="other"), lines)


def test_decoding_needs_no_extra_and_a_server_names_its_own(tmp_path) -> None:
    write_target(tmp_path)
    target = ("--target", str(tmp_path), "--draft", "lookup")
    modules = {name.replace("-", "_") for names in PACKAGES.values() for name in names} - BROUGHT
    answering = ("generate", *target, "--prompt", "hi", "--max-new-tokens", "4")
    given = json.dumps([sorted(modules), answering, ("serve", *target)])
    command = [sys.executable, "-c", RUN, given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert re.findall(r"status (\d)", done.stdout) == ["0", "2"], done.stderr
    assert "tokens/s" in done.stderr and "pip install 'drafthead[serve]'" in done.stderr
