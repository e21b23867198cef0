"""Checkpoints on the Hugging Face hub, which are kept in its cache as models are.

The cache shows a file as a link: ``models--OWNER--NAME/snapshots/COMMIT/config.json`` leads to
``models--OWNER--NAME/blobs/HASH``. No other link in a checkpoint is followed.
"""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError

from drafthead.heads.errors import UserError, first_line

SAFE_FILES = ["*.json", "*.safetensors"]
PICKLED_FILES = ["*.json", "*.bin", "*.pt", "*.pth"]  # scanned before they are loaded


def local_copy(path: Path) -> Path:
    """`path` if it is here, else for OWNER/NAME the folder with the hub's files of that name.

    Pickles are brought only where there is no file in safetensors. Raises UserError where the hub
    cannot be reached, or does not have or give the repository.
    """
    if path.exists() or not may_be_hub_id(path):
        return path
    try:
        folder = Path(snapshot_download(str(path), allow_patterns=SAFE_FILES))
        if not any(folder.rglob("*.safetensors")):
            folder = Path(snapshot_download(str(path), allow_patterns=PICKLED_FILES))
    except GatedRepoError as error:
        reason = "whoever wants it has to agree to its terms on the hub, and log in: hf auth login"
        raise UserError(f"the hub does not give {path}: {reason}") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{path} does not exist, neither here nor on the hub (one that is not public needs a "
            "login: hf auth login)"
        ) from error
    except (HTTPError, OSError, ValueError) as error:
        reason = first_line(error)
        raise UserError(
            f"{path} does not exist here, nor can the hub be asked: {reason}"
        ) from error
    return folder


def may_be_hub_id(path: Path) -> bool:
    """Whether a path has the form OWNER/NAME, and does not begin with a folder that is here."""
    owner, *rest = path.parts or ("",)
    return len(rest) == 1 and owner[0] not in "/.~" and not Path(owner).exists()


def behind_hub_link(path: Path) -> Path:
    """Where a link in a snapshot of the hub's cache leads; `path` itself if it is anything else.

    Worked example: ``models--a--b/snapshots/12/config.json``, a link to ``../../blobs/34``, gives
    ``models--a--b/blobs/34``. Of a link to ``../../../other/blobs/34`` the path itself is returned.
    """
    if not path.is_symlink():
        return path
    leads_to = Path(path.parent, path.readlink())
    for snapshot in path.absolute().parents:
        if snapshot.parent.name == "snapshots":
            blobs = (snapshot.parent.parent / "blobs").resolve()
            blob = leads_to.parent.resolve() / leads_to.name  # which may not be a link itself
            return blob if blob.parent == blobs else path
    return path
