"""HMatrix: the compressed matrix, its entries, files and pictures."""
