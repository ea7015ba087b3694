"""Measures: microbenchmarks of the hot functions (``kernels``), and whole paths beside other programs (``throughput``).

Contract: nothing here is imported by the node; nothing here asserts a time. What is compared is measured in one run,
alternating, because absolute numbers move by a third from one run to the next.
"""
