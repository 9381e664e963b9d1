"""``python -m hcurv``: the command line."""

from __future__ import annotations

from hcurv.cli.app import main

if __name__ == "__main__":
    main()
