"""`drafthead head info`: what a checkpoint holds, ours or another's, or a GGUF file says."""

import json
from pathlib import Path

from drafthead.scripts import options


def main(
    path: options.HeadPath,
) -> None:
    """Show what a head's checkpoint contains, in any known format.

    The table has its family, target, size, features, vocabulary and origin. For a target in a GGUF
    file, show which of its keys are followed. A damaged checkpoint is refused, as by all other
    commands. The table names what could not be checked without the target.
    """
    from rich.markup import escape

    from drafthead.core.printing import printable
    from drafthead.core.target.gguf_files import ACCOUNT_FILE, model_folder
    from drafthead.heads.formats import build_head, read_foreign
    from drafthead.heads.formats.base import TargetFacts
    from drafthead.lab.reports.head import rows_of, rows_of_file
    from drafthead.lab.reports.report import Table, print_table

    account = Path(model_folder(path)) / ACCOUNT_FILE
    if account.exists():
        rows = rows_of_file(json.loads(account.read_text(encoding="utf-8")), account.parent)
        print_table(Table(escape(printable(str(path))), ("", "value"), rows))
        return
    known, foreign = read_foreign(path, TargetFacts())
    if not foreign.needs_target:
        build_head(foreign, path)
    rows = [(escape(name), escape(value)) for name, value in rows_of(known, foreign)]
    notes = [printable(note) for note in foreign.notes]
    print_table(Table(escape(printable(str(path))), ("", "value"), rows), notes)
