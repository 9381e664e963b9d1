"""Factorizations of hierarchical matrices: solves, log-determinants, samples, variances."""
