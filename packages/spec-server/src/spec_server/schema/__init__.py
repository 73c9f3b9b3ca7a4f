"""Request bodies, one file per dialect: what is taken, and what it means."""
