"""The command `fdc run`, above runs and reports."""
