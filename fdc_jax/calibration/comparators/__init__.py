"""Comparators of FDC: each is a `Calibrator` and holds one idea.

Every score is per task, so that every method has a routing accuracy; methods that score classes
give a task the score of its best class. No feature of an old task is needed again.
"""
