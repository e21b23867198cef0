"""Recurrent heads: a decoder layer that feeds on its own states, and the EAGLE families."""
