"""drafthead.configs: data files only (run configurations, launchers, trees)."""
