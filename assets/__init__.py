"""drafthead.assets: data files only; the package contains the head of `smollm2_eagle3`."""
