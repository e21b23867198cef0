"""Medusa heads: one small network for each depth, independent of each other."""
