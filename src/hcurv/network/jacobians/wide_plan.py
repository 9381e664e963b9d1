"""The memory of a `WideJacobian`, and how it is filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from hcurv.network.jacobians.contractions import without_tiny
from hcurv.network.jacobians.jacobian_plan import ChainShape, JacobianPlan, store_factors
from hcurv.network.jacobians.output_jacobian import OutputJacobian
from hcurv.network.jacobians.wide_jacobian import WideJacobian

__all__ = ["WidePlan"]


@dataclass(frozen=True)
class WidePlan(JacobianPlan):
    """Interface, head, Gram values and tail.

    Attributes:
        chain: the network.
    """

    chain: ChainShape

    @classmethod
    def suits(cls, chain: ChainShape) -> bool:
        """Whether this form exists and stores less than the columns of the hidden units."""
        width = chain.network.layers[-1].in_features
        return chain.diagonal and 0 < chain.num_hidden < chain.num_rows - width

    @property
    def _width(self) -> int:
        """r, the width of the last hidden layer."""
        return self.chain.network.layers[-1].in_features

    @property
    def num_floats(self) -> int:
        """Everything in `WideJacobian.tensors`."""
        chain, num_hidden = self.chain, self.chain.num_hidden
        per_point = num_hidden * (num_hidden + self._width) + chain.num_rows
        return chain.num_points * per_point + chain.num_rows * self._width

    @property
    def working_floats(self) -> int:
        """The weighted W_L, and interface and Gram values in three stages."""
        num_hidden, width = self.chain.num_hidden, self._width
        return 2 * width * self.chain.num_rows + 3 * num_hidden * (num_hidden + width)

    @property
    def read_floats(self) -> int:
        """The interface."""
        return self.chain.num_hidden * self._width

    @property
    def weight_products(self) -> int:
        """Products with W_L and its transpose."""
        return 2 * self._width * self.chain.num_rows

    def reserve(self) -> WideJacobian:
        """Memory for all but the head, which is the weight of the last layer."""
        chain, last = self.chain, self.chain.hidden[-1]
        adjacent = last.position == len(chain.network.layers) - 2
        return WideJacobian(
            num_hidden=chain.num_hidden,
            tail=chain.empty(chain.num_rows),
            tail_trainable=chain.tail is not None,
            interface=chain.empty(chain.num_hidden, self._width),
            head=chain.network.layers[-1].weight,
            hidden_pairs=chain.empty(chain.num_hidden**2),
            first_adjacent=last.units.start if adjacent else last.units.stop,
        )

    def fill(
        self,
        jacobian: OutputJacobian,
        points: slice,
        root: Tensor,
        slopes: Sequence[Tensor | None],
    ) -> None:
        """Begin with B^{L-1} = M^{L-1}."""
        assert isinstance(jacobian, WideJacobian)
        position = len(slopes) - 2
        last, slope = slopes[-1], slopes[-2]
        tail = without_tiny(root if last is None else root * last)
        jacobian.tail[:, points] = tail.T
        ones = root.new_ones(1) if slope is None else slope
        factor = torch.diag_embed(ones.expand(len(root), self._width)).permute(2, 1, 0)
        store_factors(self.chain, jacobian.interface, points, factor, position, slopes)
        _fill_hidden_pairs(jacobian, tail, points)


def _fill_hidden_pairs(jacobian: WideJacobian, tail: Tensor, points: slice) -> None:
    """g_i = B_iᵀ (W_Lᵀ diag(c_i²) W_L) B_i for all pairs of hidden units."""
    head = jacobian.head
    interface = jacobian.interface[:, :, points].permute(2, 0, 1).contiguous()
    weighted = head.T[None] * tail.square()[:, None, :]
    gram = interface @ (weighted @ head) @ interface.transpose(1, 2)
    # This makes them symmetric to the last bit, so that H is, too.
    gram = (gram + gram.transpose(1, 2)) / 2
    # These are products of two columns; the threshold keeps them normal when multiplied by inputs.
    limits = torch.finfo(gram.dtype)
    jacobian.hidden_pairs[:, points] = hardshrink(gram, limits.tiny / limits.eps).flatten(1).T
