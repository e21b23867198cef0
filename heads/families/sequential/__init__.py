"""Sequential heads: each depth reads the token that the depth before it guessed."""
