"""A run: its configuration, the loop over tasks, and its work directory."""
