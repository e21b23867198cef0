"""drafthead.heads.families: one draft head a file, with its drafter.

Importing the package imports every module beside this file, so that each head registers itself.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
