"""One file per class-incremental learner."""
