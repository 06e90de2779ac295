"""What was asked for: a YAML file as a RunConfig, or every error in it at once."""
