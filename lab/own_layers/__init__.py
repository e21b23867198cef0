"""drafthead.lab.own_layers: which layers of a target draft best."""
