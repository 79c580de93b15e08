"""Benchmarks, class order, images and batches."""
