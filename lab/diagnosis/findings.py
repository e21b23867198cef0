"""Reports of checks of heads and servers: what was seen, and what to do about it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Finding:
    """A finding of a check, and what to do if it is a fault; else `remedy` is None."""

    evidence: str
    remedy: str | None = None

    @property
    def is_fault(self) -> bool:
        """Tell whether there is something to do."""
        return self.remedy is not None


class Checks(dict[str, Callable[[Subject], Finding | None]], Generic[Subject]):
    """Checks of a subject by what they look for; None of a check: there is nothing to look at."""

    def add(self, name: str) -> Callable[[Any], Any]:
        """Register a check under a name."""
        return lambda check: self.setdefault(name, check)

    def findings(self, subject: Subject) -> dict[str, Finding]:
        """The findings of all checks that had something to look at."""
        found = {name: check(subject) for name, check in self.items()}
        return {name: finding for name, finding in found.items() if finding is not None}


def faults_first(findings: dict[str, Finding]) -> dict[str, Finding]:
    """Findings in the order in which they are shown."""
    return dict(sorted(findings.items(), key=lambda item: not item[1].is_fault))
