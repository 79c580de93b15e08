"""Configurations of runs that take seconds."""

from configs import digits


def config(cache, train_per_class, test_per_class):
    """Two tasks of five digits, one epoch, no report, with a cache folder."""
    found = digits.get_config()
    found.cache_dir = str(cache)
    found.classes_per_task = 5
    found.data.train_per_class = train_per_class
    found.data.test_per_class = test_per_class
    found.train.epochs = 1
    found.report = False
    return found
