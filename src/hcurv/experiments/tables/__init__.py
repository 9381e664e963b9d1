"""The paper's tables, one module each."""

from hcurv.experiments.tables import (
    comparison,
    complexity,
    cost_accuracy,
    influence,
    influence_damping,
    laplace,
    memory,
    pruning,
    sampled_compression,
    sampling,
    training,
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
        pruning.TABLE,
        training.TABLE,
        influence.TABLE,
        influence_damping.TABLE,
        laplace.TABLE,
    )
}
