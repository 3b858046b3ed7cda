"""Passes over memory that have an eager and a compiled form, one function for each.

A function decides which form runs: compressors call it and know neither whether there is a library of compiled passes
(`commhooks.native`), nor what it takes. Both forms have equal bits, except for sums that compiled code adds up in
double precision: the scales of `Sign` and `QSGD`, and the means of SparseLoCo's bins.
"""
