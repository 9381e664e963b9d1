"""Pruning: which weights go, and how the others move to make up for it."""

from hcurv.applications.pruning.prune import prune
from hcurv.applications.pruning.result import Pruning, PruningStep

__all__ = ["Pruning", "PruningStep", "prune"]
