"""Run the command line as ``python -m hcurv``."""

from __future__ import annotations

from hcurv.cli.app import main

if __name__ == "__main__":
    main()
