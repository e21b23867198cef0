"""drafthead.core.target: the frozen base model behind one interface."""
