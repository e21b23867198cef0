"""What checks of heads and of servers report: what was seen, and what to do about it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A finding of a check, and what to do if it is a fault; else `remedy` is None."""

    evidence: str
    remedy: str | None = None

    @property
    def is_fault(self) -> bool:
        """Tell whether there is something to do."""
        return self.remedy is not None


def faults_first(findings: dict[str, Finding]) -> dict[str, Finding]:
    """Findings in the order in which they are shown."""
    return dict(sorted(findings.items(), key=lambda item: not item[1].is_fault))
