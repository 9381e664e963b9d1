"""The network half: a model and its data become layer Jacobians, and these the matrix H = Σ JᵀQJ.

Nothing here knows of trees or compression; the other half asks for entries and products alone.
"""
