"""drafthead.infer.measuring: comparison, profiles and the tests of exactness."""
