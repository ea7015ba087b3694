"""Whole paths, measured: two hosts in network namespaces, one program between them at a time.

Contract: a *contender* (``contenders``) connects two hosts so that an overlay address of each reaches the other's; a
*measure* (``measures``) drives traffic between those addresses and returns plain numbers whose names carry their unit;
``command`` alternates contenders within each round, and ``report`` turns the rounds into medians and ratios.
"""
