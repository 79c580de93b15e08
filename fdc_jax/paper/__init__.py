"""The command `fdc paper`: all runs of the paper, from a plan over workers to the tables."""
