"""The methods that hierarchical matrices are compared with."""

from hcurv.baselines.diagonal import BlockDiagonal, Diagonal
from hcurv.baselines.kfac import KFAC
from hcurv.baselines.low_rank import LowRank
from hcurv.baselines.matrix_free import MatrixFree

__all__ = ["KFAC", "BlockDiagonal", "Diagonal", "LowRank", "MatrixFree"]
