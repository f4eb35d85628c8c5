"""The declared suites (NAME.toml), with what belongs to one framework only: preparations and pytest plugins."""
