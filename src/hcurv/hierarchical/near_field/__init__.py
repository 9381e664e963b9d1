"""Near fields: exact blocks between leaves that hold each other's nearest neighbours.

Everything about them is here: how near leaves are chosen (`interactions`), and the matrix that
stores their blocks (`matrix`). The rest of the package knows nothing but a `BlockPattern`.
"""
