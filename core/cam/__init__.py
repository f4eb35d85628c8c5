"""Communication ops for large models."""
