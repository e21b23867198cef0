"""What a head's checkpoint or the copy of a GGUF file holds, as rows that are fit to print."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape

from drafthead.heads.formats.base import Foreign, Format
from drafthead.heads.formats.printing import printable

UNKNOWN = "not recorded"
LONGEST = 90  # characters of a value that are shown


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
