"""Training of draft heads: conversations, distillation, features, the loop and its entry point."""
