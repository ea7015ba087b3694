"""Measures: microbenchmarks of the hot functions, and throughput against other programs in one run.

Nothing here is imported by the node; nothing here asserts a time.
"""
