"""Compare methods on one network, and write the comparison as one HTML page."""

from hcurv.report.save import save_report

__all__ = ["save_report"]
