"""A registry: things by name, some of which stand elsewhere and are imported when named."""

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TypeVar

Entry = TypeVar("Entry")


class Registry(MutableMapping[str, Entry]):
    """Entries by name, in the order in which they were registered or announced.

    `elsewhere` announces names whose module (a dotted name) registers them when it is imported;
    that happens at the first look-up. So the core knows the names of what few need, and not more.
    """

    def __init__(self, elsewhere: Mapping[str, str] | None = None):
        self._entries: dict[str, Entry] = {}
        self._elsewhere = dict(elsewhere or {})

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries and name in self._elsewhere:
            importlib.import_module(self._elsewhere[name])
        return self._entries[name]

    def __setitem__(self, name: str, entry: Entry) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._elsewhere

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._entries, *self._elsewhere]))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def register(self, name: str, entry: Entry, noun: str) -> None:
        """Add an entry; raises ValueError, which calls it `noun`, when the name is taken."""
        if name in self._entries:
            raise ValueError(f"two {noun} are called {name!r}")
        self._entries[name] = entry
