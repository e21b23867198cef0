"""`drafthead head info`: what a checkpoint holds, ours or another's, or a GGUF file says."""

from drafthead.scripts import options


def main(
    path: options.HeadPath,
) -> None:
    """Show what a head's checkpoint contains, in any known format.

    The table has its family, target, size, features, vocabulary and origin. For a target in a GGUF
    file, show which of its keys are followed. A damaged checkpoint is refused, as by all other
    commands. The table names what could not be checked without the target.
    """
    from drafthead.lab.reports.head import described
    from drafthead.lab.reports.report import print_table

    print_table(*described(path))
