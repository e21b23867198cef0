"""drafthead.infer.verifiers: acceptance rules, one a file.

Importing the package imports every module beside this file, so that each rule registers itself.
"""

import importlib
import pkgutil

from drafthead.infer.verifiers.base import (
    VERIFIERS,
    Acceptance,
    Verifier,
    rule_of_rows,
    verifier_for,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["VERIFIERS", "Acceptance", "Verifier", "rule_of_rows", "verifier_for"]
