"""drafthead.contrib.own_layers: a target that drafts with some of its own layers."""
