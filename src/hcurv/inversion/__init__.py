"""Inverses of A + D that can be trusted: exact in either space, approximate with a certificate."""
