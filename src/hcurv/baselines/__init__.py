"""The methods that hierarchical matrices are compared with."""

from hcurv.baselines.block_diagonal import BlockDiagonal
from hcurv.baselines.kfac import KFAC
from hcurv.baselines.low_rank import LowRank
from hcurv.baselines.matrix_free import MatrixFree
from hcurv.diagonal import Diagonal

__all__ = ["KFAC", "BlockDiagonal", "Diagonal", "LowRank", "MatrixFree"]
