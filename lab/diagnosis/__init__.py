"""drafthead.lab.diagnosis: why a head is accepted less often than it could be."""
