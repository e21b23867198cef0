"""A registry: things by name, some of which stand elsewhere and are imported when named."""

import importlib
import logging
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from drafthead.core.errors import UserError, first_line

logger = logging.getLogger(__name__)

Entry = TypeVar("Entry")
PLUGINS = "drafthead.plugins"  # modules of other packages that register what is theirs


@cache
def waiting_plugins() -> list[EntryPoint]:
    """The plugins of installed packages that are not imported yet."""
    return list(entry_points(group=PLUGINS))


def load_plugins() -> None:
    """Import all plugins, once; one that fails is left out with a warning, and others go on."""
    waiting = waiting_plugins()
    while waiting:
        plugin = waiting.pop(0)
        try:
            plugin.load()
        except Exception as error:  # any that its code may raise
            logger.warning("the plugin %s is left out: %s", plugin.value, first_line(error))


class Registry(MutableMapping[str, Entry]):
    """Entries by name, in the order in which they were registered or announced.

    `elsewhere` announces names whose module (a dotted name) registers them when it is imported;
    that happens at the first look-up. So the core knows the names of what few need, and not more.
    A string is a group of entry points, by which installed packages announce them. Plugins are
    imported before a name counts as unknown, and before all names are listed.
    """

    def __init__(self, elsewhere: Mapping[str, str] | str = ""):
        self._entries: dict[str, Entry] = {}
        self._announced = elsewhere

    @cached_property
    def _elsewhere(self) -> Mapping[str, str]:
        """The modules of announced names."""
        if not isinstance(self._announced, str):
            return self._announced
        return {point.name: point.value for point in entry_points(group=self._announced)}

    def __getitem__(self, name: str) -> Entry:
        """Raises UserError for a name that a package should announce, and KeyError for others."""
        if name not in self and isinstance(self._announced, str) and self._announced:
            raise UserError(
                f"no installed package announces {name!r} of {self._announced}: install drafthead "
                "again, in a clone by pip install -e ."
            )
        if name not in self._entries and name in self._elsewhere:
            importlib.import_module(self._elsewhere[name])
        return self._entries[name]

    def __setitem__(self, name: str, entry: Entry) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._entries and name not in self._elsewhere:
            load_plugins()
        return name in self._entries or name in self._elsewhere

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        return iter(dict.fromkeys([*self._entries, *self._elsewhere]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def register(self, name: str, entry: Entry, noun: str) -> None:
        """Add an entry; raises ValueError, which calls it `noun`, when the name is taken."""
        taken_by = self._elsewhere.get(name, __name__)  # being imported, where this is its entry
        if name in self._entries or taken_by not in sys.modules:
            raise ValueError(f"two {noun} are called {name!r}")
        self._entries[name] = entry
