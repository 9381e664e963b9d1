"""hcurv.load: read a matrix or a factorization from the file that it was saved to."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING

import torch

from hcurv.factorized import check_float_type
from hcurv.files import as_path
from hcurv.hierarchical.matrix import storage
from hcurv.hierarchical.matrix.hmatrix import HMatrix
from hcurv.hierarchical.matrix.sharded_files import load_shards
from hcurv.hierarchical.near_field.matrix import NEAR_FIELD, make_near_field
from hcurv.hierarchical.solving.factorization import Factorization
from hcurv.ranks import ranks_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["load"]


def load(
    path: str | PathLike[str],
    device: torch.device | str = "cpu",
    process_group: ProcessGroup | None = None,
) -> HMatrix | Factorization:
    """Read what `HMatrix.save`, `DistributedHMatrix.save` or `Factorization.save` wrote.

    Args:
        path: the file, or the folder of a matrix that was spread over ranks.
        device: where the tensors shall live.
        process_group: a group of `torch.distributed` whose ranks shall share the matrix of a
            folder. There may be more or fewer of them than wrote it. Without it, one process
            reads all.

    Raises:
        FileNotFoundError: there is no such file.
        FileFormatError: the file is foreign, damaged, or of another version of the format.

    Examples:
        >>> A.save("A.safetensors")
        >>> torch.equal(hcurv.load("A.safetensors") @ b, A @ b)
        True
    """
    ranks = ranks_of(process_group)
    path = as_path(path)
    if path.is_dir():
        return load_shards(path, device, ranks)
    if ranks.size > 1 and path.is_file():
        raise ValueError(
            f"{path} is a file, which one process reads: leave process_group out. Ranks share what"
            " DistributedHMatrix.save has written to a folder"
        )
    makers: dict[str, Callable[..., HMatrix | Factorization]] = {
        storage.MATRIX: storage.make_matrix,
        storage.FACTORIZATION: storage.make_factorization,
        NEAR_FIELD: make_near_field,
    }
    check_float_type(None, device)
    return storage.read_file(path, device, makers)
