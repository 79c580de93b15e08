"""A run: its set-up, the loop over tasks, what it writes, what reads it again, its command."""
