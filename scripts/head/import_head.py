"""`drafthead head import`: converts a head of other software to our format.

The file is not called `import.py`, because no import statement can name that.
"""

from drafthead.core.printing import printable
from drafthead.core.storage.files import fresh_folder
from drafthead.scripts import options


def main(
    path: options.HeadPath,
    output: options.NewFolder,
    target: options.HeadTarget = None,
) -> None:
    """Convert a head from another project to our own format.

    You do not have to: --draft of all commands reads such checkpoints directly. Converting writes a
    checked copy in safetensors, in the same number type. The format is recognised from the files,
    and nothing in them is executed. A head that drafthead would compute differently is refused.
    """
    from drafthead.core.target.any_target import load_decoder_only
    from drafthead.heads.formats import build_head, read_foreign
    from drafthead.heads.formats.base import TargetFacts
    from drafthead.heads.formats.drafthead import save_head

    loaded = load_decoder_only(target, device="cpu") if target else None
    facts = TargetFacts.of(loaded, target) if loaded else TargetFacts()
    known, foreign = read_foreign(path, facts)
    head = build_head(foreign, path, loaded)
    origin = {
        "imported_from": {"format": known.name, "path": str(path), "notes": list(foreign.notes)},
        **foreign.provenance,
    }
    described = facts.completed(foreign.target)
    with fresh_folder(output) as temporary:
        save_head(head, temporary, described, described.name, origin, dtype=None)
    for note in foreign.notes:
        print(f"note: {printable(note)}")
    print(f"{known.name} -> {output}: a head of the family {head.family}, depth {head.depth}")
