"""One model over several processes, each with a share of every matrix (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053).

Queries, keys, values, gate and up are split by rows, so that a rank computes whole heads and whole inner units; the
output and down projections by columns, so that the ranks' results add up to the layer's. Embedding and head are split
by tokens of the vocabulary. The first rank schedules, samples and serves; the others are told each step's plan.
"""
