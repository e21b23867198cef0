"""Names that users give to models, heads and data: is there what can only be a path?

This file imports no library, so that the command line refuses a wrong name before it imports any.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from drafthead.core.errors import UserError

FETCHED_MODELS = ("smollm2", "gemma3-270m", "qwen2.5-coder-1.5b")  # what `drafthead fetch` brings
SHIPPED_HEADS = {"smollm2-eagle3": "smollm2_eagle3"}  # by the folders of assets that hold them
DATA_SUFFIXES = (".jsonl", ".json", ".parquet")
PLACEHOLDER = "MODEL"  # the target of the configurations that come with drafthead


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: which known one may be meant, or nothing."""
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def may_be_hub_id(name: str | Path) -> bool:
    """Whether a name has the form OWNER/NAME, and does not begin with a folder that is here."""
    owner, *rest = Path(name).parts or ("",)
    return len(rest) == 1 and str(name)[0] not in "/.~" and not Path(owner).exists()


def is_in_cache(name: str, file: str) -> bool:
    """Whether the hub's cache here has this file of a name."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, file), str)
    except HFValidationError:
        return False


def refuse_missing_model(name: str) -> None:
    """Raise UserError for a name that can only be a path, when nothing is there.

    Asking the hub for it takes many seconds and ends in a worse message; so does a misspelt folder
    within an existing one. Names without an owner are taken from the hub's cache.
    """
    if name == PLACEHOLDER and not Path(name).exists():
        raise UserError(
            f"{name} stands for your model: name it, or write a configuration for it with "
            "drafthead train --init FAMILY --target YOURS --config FILE"
        )
    is_here = Path(name).exists() or name in FETCHED_MODELS or may_be_hub_id(name)
    if is_here or is_in_cache(name, "config.json"):
        return
    what = "file" if Path(name).suffix.lower() == ".gguf" else "folder"
    raise UserError(
        f"cannot load the model {name}: this {what} does not exist (names on the hub have the form "
        f"OWNER/NAME){suggestion(name, FETCHED_MODELS)}"
    )


def refuse_missing_head(name: str) -> None:
    """Raise UserError for a head that is neither here nor shipped, and no name on the hub."""
    if not Path(name).exists() and name not in SHIPPED_HEADS and not may_be_hub_id(name):
        near = suggestion(name, SHIPPED_HEADS) or ": is it a trained head?"
        raise UserError(f"{name} does not exist{near}")


def refuse_missing_draft(name: str) -> None:
    """Raise UserError for a path of `--draft` where nothing is; kinds of drafters are no paths."""
    if "/" in name and ":" not in name:
        refuse_missing_head(name)


def refuse_missing_data(source: str) -> None:
    """Raise UserError for a source of data that is not here, and no name of a data set."""
    may_be_data_set = Path(source).suffix not in DATA_SUFFIXES and source[:1] not in tuple("./~")
    if not Path(source).expanduser().exists() and not may_be_data_set:
        made = ", or write it: make demo-offline" if source.startswith("runs/demo/") else ""
        raise UserError(f"{source} does not exist: check the path{made}")
