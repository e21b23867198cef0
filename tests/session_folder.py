"""A cache and a home of the session's own: tests neither read nor leave anything in the user's.

Importing this sets the environment, of this process and of those that it starts. What one test has
compiled serves the others of the session, and goes with it.
"""

import os
import shutil
import site
from pathlib import Path
from tempfile import mkdtemp

# Each would go before the cache or the home.
OTHER_PLACES = (
    "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE", "HF_TOKEN",
    "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CONFIG_HOME",
)  # fmt: skip


def begin_session() -> Path | None:
    """Set the environment, and give the folder to remove at the end.

    None in a worker of pytest-xdist, which has inherited the session's environment.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return None
    folder = Path(mkdtemp(prefix="drafthead-tests-"))
    # Packages that were installed for the user alone are found through the home.
    os.environ.setdefault("PYTHONUSERBASE", site.getuserbase())
    for name in OTHER_PLACES:
        os.environ.pop(name, None)
    for name, part in (("HOME", "home"), ("XDG_CACHE_HOME", "cache")):
        (folder / part).mkdir()
        os.environ[name] = str(folder / part)
    return folder


SESSION = begin_session()


def end_session() -> None:
    """Remove what the session has kept."""
    if SESSION is not None:
        shutil.rmtree(SESSION, ignore_errors=True)
