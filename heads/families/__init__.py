"""drafthead.heads.families: draft heads and their drafters, `x.py` and `x_drafter.py`.

Importing the package imports every module beside this file, so that each head and each
drafter registers itself.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
