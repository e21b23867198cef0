"""drafthead.contrib: what few need, registered by name and imported when it is named."""
