"""The root of any model: one Jacobian for each parameter, in the form that takes least memory."""

from hcurv.network.layered.layered_root import LayeredRoot

__all__ = ["LayeredRoot"]
