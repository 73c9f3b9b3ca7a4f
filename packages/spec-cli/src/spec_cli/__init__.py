"""The command `spec`."""
