"""A plugin that counts the processor seconds of each file; every run leaves them in pytest's cache.

Files that take long come first, or one worker ends with them while the others wait.

Seconds of the worker and of the processes it waited for: what else a machine does hardly changes
them. After a whole first stage `python tests/durations.py` commits them.
"""

import json
import resource
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

KEY = "drafthead/durations"
COMMITTED = Path(__file__).with_name("durations.json")
LAST = Path(__file__).parents[1] / ".pytest_cache" / "v" / KEY
SECONDS = "processor_seconds"


def processor_seconds() -> float:
    """Used by this process and by those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def committed() -> Counter[str]:
    """The processor seconds of each file."""
    return Counter(json.loads(COMMITTED.read_text())["seconds"])


def file_of(name: str) -> str:
    """The file of a test."""
    return name.partition("::")[0]


class Durations:
    """Processor seconds by the names of tests."""

    def __init__(self) -> None:
        self.started = 0.0
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Order tests by the committed seconds of their files, from the longest on."""
        taken = committed()
        items.sort(key=lambda item: -taken[file_of(item.nodeid)])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """A test begins, in a worker."""
        self.started = processor_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """Each report of a test has the seconds up to here; the last one has all of them."""
        report = yield
        report.user_properties = [(SECONDS, round(processor_seconds() - self.started, 3))]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A report arrives, in the process that the user has started."""
        self.seconds[report.nodeid] = dict(report.user_properties).get(SECONDS, 0.0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write what was counted."""
        cache = getattr(session.config, "cache", None)
        if cache is not None and not hasattr(session.config, "workerinput"):
            cache.set(KEY, self.seconds)


if __name__ == "__main__":
    seconds, last = Counter[str](), json.loads(LAST.read_text())
    for name, taken in last.items():
        seconds[file_of(name)] += taken
    about = f"processor seconds of {len(last)} tests in one run, {date.today()}"
    rounded = {name: round(taken, 1) for name, taken in sorted(seconds.items())}
    COMMITTED.write_text(json.dumps({"about": about, "seconds": rounded}, indent=1) + "\n")
    print(f"{seconds.total():.0f} {about}: {COMMITTED}")
