"""Measures: microbenchmarks of the hot functions (``kernels``), whole paths beside other programs (``throughput``), the
start (``startup``), the stages of a packet's way (``profile``), and two nodes under load for long (``soak``).

Contract: nothing here is imported by the node; nothing here asserts a time. What is compared is measured in one run,
alternating, because absolute numbers move by a third from one run to the next.
"""
