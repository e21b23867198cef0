"""drafthead.train.run: a training run: its configuration, its folder and its saved states."""
