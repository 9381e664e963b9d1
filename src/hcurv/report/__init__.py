"""A comparison as one HTML page that needs nothing else."""

from hcurv.report.save import save_report

__all__ = ["save_report"]
