"""The paper's tables, one module each."""

from hcurv.experiments.tables import (
    comparison,
    complexity,
    cost_accuracy,
    laplace,
    memory,
    sampled_compression,
    sampling,
)
from hcurv.experiments.tables.table import Table

__all__ = ["TABLES", "Table"]

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        cost_accuracy.TABLE,
        comparison.TABLE,
        memory.TABLE,
        sampling.TABLE,
        sampled_compression.TABLE,
        complexity.TABLE,
        laplace.TABLE,
    )
}
