"""`drafthead info`: what a checkpoint holds, ours or another's, or the copy of a GGUF file."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape

from drafthead.heads.formats import build_head, read_foreign
from drafthead.heads.formats.base import Foreign, Format, TargetFacts
from drafthead.heads.formats.printing import printable
from drafthead.heads.target.gguf_files import ACCOUNT_FILE, model_folder
from drafthead.lab.reports.report import Table, print_table
from drafthead.scripts import options

UNKNOWN = "not recorded"
LONGEST = 90  # characters of a value that are shown


def main(
    path: options.HeadPath,
) -> None:
    """Print family, target, size, features, vocabulary and origin of a draft head.

    Of a target in a GGUF file: what its copy holds, and what of it was compared with the file.

    The head is read as all other verbs read it, so a damaged one is refused here too. What only
    the target can show, such as the shapes of tensors that the file leaves open, is not checked;
    the table says so.
    """
    account = Path(model_folder(path)) / ACCOUNT_FILE
    if account.exists():
        rows = rows_of_copy(json.loads(account.read_text(encoding="utf-8")), account.parent)
        print_table(Table(escape(printable(str(path))), ("", "value"), rows))
        return
    known, foreign = read_foreign(path, TargetFacts())
    if not foreign.needs_target:
        build_head(foreign, path)
    rows = [(escape(name), escape(value)) for name, value in rows_of(known, foreign)]
    notes = [printable(note) for note in foreign.notes]
    print_table(Table(escape(printable(str(path))), ("", "value"), rows), notes)


def rows_of(known: Format, foreign: Foreign) -> list[tuple[str, str]]:
    """What is known of a head, as rows of name and value that are fit to print."""
    count = sum(tensor.numel() for tensor in foreign.tensors.values())
    kinds = sorted(
        {str(tensor.dtype).removeprefix("torch.") for tensor in foreign.tensors.values()}
    )
    target = foreign.target
    sizes = (
        f"hidden size {target.hidden_size or UNKNOWN}, vocabulary {target.vocab_size or UNKNOWN}, "
        f"layers {target.num_layers or UNKNOWN}"
    )
    rows = [
        ("format", f"{known.name} (read by {known.readers})"),
        ("family", foreign.family),
        ("target", f"{target.name or UNKNOWN}: {sizes}"),
        ("parameters", f"{count:,} in {', '.join(kinds)}"),
        ("features", foreign.taps),
        ("vocabulary", vocabulary(foreign)),
        ("measured acceptance", f"{len(foreign.path_counts or {})} paths"),
        *((f"config {name}", str(value)) for name, value in asdict(foreign.config).items()),
        *(
            (f"origin {name}", value if isinstance(value, str) else json.dumps(value))
            for name, value in foreign.provenance.items()
        ),
        ("checked", checked(foreign)),
    ]
    if foreign.needs_target:
        rows.append(("left to the target", foreign.needs_target))
    return [(printable(name, LONGEST), printable(value, LONGEST)) for name, value in rows]


def rows_of_copy(account: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """What is known of the copy of a GGUF file, as rows of name and value that are fit to print."""
    rows = [
        ("format", f"GGUF, architecture {account['architecture']}, read from a copy in bfloat16"),
        ("copy", str(folder)),
        ("weights", f"{account['weights']} tensors, each equal to what the package gguf reads"),
        ("rotary positions", json.dumps(account["rope"])),
        ("ends of answers", ", ".join(map(str, account["ends"])) or "none"),
        *((key, "in the copy") for key in account["keys_used"]),
        *((key, "changes nothing") for key in account["keys_neutral"]),
    ]
    return [(escape(printable(name)), escape(printable(value))) for name, value in rows]


def checked(foreign: Foreign) -> str:
    """How much of what loading checks was checked here."""
    if foreign.needs_target:
        return "configuration and values; not names, shapes and types of tensors without the target"
    return "configuration and all tensors; not whether it fits its target"


def vocabulary(foreign: Foreign) -> str:
    """Which tokens the head can draft."""
    if "d2t" in foreign.tensors:
        return f"{foreign.tensors['d2t'].numel():,} of {foreign.target.vocab_size or UNKNOWN}"
    return "the target's"
