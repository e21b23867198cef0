"""Hooks on a model that several threads use: a pass belongs to the thread that makes it.

A hook sits on a module that all threads share, so it fires in the passes of every thread. Two
things keep passes apart. Passes with hooks hold the model's lock, which all targets over the model
share. And a hook ignores other threads, because whoever owns the model may run it without the lock.
Such hooks alone would not be enough: torch traces all hooks that it finds into a graph, those of
other threads' passes among them.
"""

from collections.abc import Callable
from threading import Lock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

# Not attributes of the models, which could then be neither copied nor pickled.
_locks: WeakKeyDictionary[nn.Module, Lock] = WeakKeyDictionary()
_looking_up = Lock()


def hook_lock(model: nn.Module) -> Lock:
    """The lock to hold while hooks are attached to a model: for a pass, not for a generation."""
    with _looking_up:
        return _locks.setdefault(model, Lock())


def share_lock(model: nn.Module, other: nn.Module) -> None:
    """Let passes over a model take the lock of `other`, of whose modules it is made."""
    lock = hook_lock(other)
    with _looking_up:
        _locks[model] = lock


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for passes of the calling thread; in other threads it does nothing."""
    owner = get_ident()

    def call(*arguments: Any) -> Any:
        # The tracer does not know `get_ident`, and traces the calling thread only.
        if torch.compiler.is_dynamo_compiling() or get_ident() == owner:
            return hook(*arguments)
        return None

    return call
