"""drafthead.lab: measuring, theory, diagnosis, plans, reports. Decoding never imports it."""
