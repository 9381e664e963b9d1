"""Orders of the rows of a matrix, and the binary tree over an order."""
