"""Comparators of FDC: calibrators that never need features of an earlier task again.

Methods that score classes give a task the score of its best class.
"""
