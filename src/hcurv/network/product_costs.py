"""Which way to multiply is cheaper: with stored factors, or by linearised passes.

Both multiply by Ŵ and add up Σ_i z_i x_iᵀ, 2N multiplications for each point and right-hand side.
With stored factors, everything else is read from memory, and the outputs of a wide network are
reached through W_L. Linearised passes go through the weights of all layers instead, twice.

The choice depends on the shape of the network alone, so that it is always the same.
"""

from __future__ import annotations

from hcurv.network.jacobians.jacobian_plan import ChainShape, JacobianPlan

__all__ = ["passes_are_cheaper"]

# Multiplications in a matrix product that take as long as one with a stored factor, which is read
# from memory for it. Timed on fifteen networks with 1, 16 and 128 right-hand sides: it is 3 to 4
# with 128, and 10 to 20 with one.
_FACTOR_COST = 3.0

# The same with an R_i that is not diagonal, which linearised passes read in another order.
_ROOT_COST = 6.0

# The same for slopes, and for values of units that are in the cache.
_VALUE_COST = 3.0

# Linearised passes are chosen if they are predicted to take less than this share of the time.
_LESS = 0.8


def passes_are_cheaper(chain: ChainShape, jacobian: JacobianPlan) -> bool:
    """Whether linearised passes multiply faster than stored factors.

    Args:
        chain: the network and the shape of the loss's square root.
        jacobian: how the factors would be stored.
    """
    network = chain.network
    layers = network.layers[network.first_trainable :]
    with_rhs = 2 * network.num_parameters
    stored = with_rhs + jacobian.weight_products + 2 * _FACTOR_COST * jacobian.read_floats
    weights = sum(layer.weight.numel() for layer in layers[1:])
    units = sum(layer.out_features for layer in layers)
    passes = with_rhs + 2 * weights + 2 * _VALUE_COST * units
    if not chain.diagonal:
        passes += 2 * _ROOT_COST * chain.num_rows * network.num_outputs
    return passes < _LESS * stored
