"""Comparators of FDC: calibrators of one idea, which need no feature of an old task again.

Methods that score classes give a task the score of its best class.
"""
