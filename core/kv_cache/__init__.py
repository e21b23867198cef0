"""drafthead.core.kv_cache: keys and values of what was read, and the memory that they lie in."""
