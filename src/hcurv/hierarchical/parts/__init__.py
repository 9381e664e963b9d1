"""The parts that hierarchical matrices and their factorizations are made of."""
