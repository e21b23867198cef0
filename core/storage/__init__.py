"""drafthead.core.storage: files that a crash leaves whole, and what later runs can reuse."""
