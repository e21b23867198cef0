"""What measurements share: their JSON says with which command, where and by what it was made."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafthead.core.storage.files import write_json
from drafthead.infer.timing.machine import describe_machine, describe_versions


def about_run() -> dict[str, Any]:
    """The command, the machine and the versions."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "machine": describe_machine(),
        "versions": describe_versions(),
    }


def write_record(file: Path, found: Mapping[str, Any]) -> None:
    """Write what was found, after what `about_run` says."""
    write_json(file, about_run() | dict(found))
