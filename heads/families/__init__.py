"""drafthead.heads.families: draft heads and their drafters, a folder or a file for each family.

Importing the package imports every module below it, so that each head and each drafter registers
itself.
"""

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
