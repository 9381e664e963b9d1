"""hcurv.load: read a matrix or a factorization from the file that it was saved to."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike

import torch

from hcurv.factorized import check_float_type
from hcurv.hierarchical.matrix import storage
from hcurv.hierarchical.matrix.hmatrix import HMatrix
from hcurv.hierarchical.near_field.matrix import NEAR_FIELD, make_near_field
from hcurv.hierarchical.solving.factorization import Factorization

__all__ = ["load"]


def load(path: str | PathLike[str], device: torch.device | str = "cpu") -> HMatrix | Factorization:
    """Read what `HMatrix.save` or `Factorization.save` wrote.

    Args:
        path: the file.
        device: where the tensors shall live.

    Raises:
        FileNotFoundError: there is no such file.
        FileFormatError: the file is foreign, damaged, or of another version of the format.

    Examples:
        >>> A.save("A.safetensors")
        >>> torch.equal(hcurv.load("A.safetensors") @ b, A @ b)
        True
    """
    makers: dict[str, Callable[..., HMatrix | Factorization]] = {
        storage.MATRIX: storage.make_matrix,
        storage.FACTORIZATION: storage.make_factorization,
        NEAR_FIELD: make_near_field,
    }
    check_float_type(None, device)
    return storage.read_file(path, device, makers)
