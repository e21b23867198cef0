"""Training of draft heads: prompts, conversations, features, the loop and its entry point."""
