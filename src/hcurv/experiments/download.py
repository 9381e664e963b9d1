"""Download a file completely and correctly, or leave nothing behind."""

from __future__ import annotations

import http.client
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from hcurv.files import replacing

__all__ = ["DownloadError", "download"]

# A server that sends nothing for this many seconds is given up.
_TIMEOUT = 30.0


class DownloadError(OSError):
    """A download failed. The message gives the reason in one line."""


def download(address: str, path: Path, check: Callable[[Path], object]) -> None:
    """Fetch a file. It replaces an existing one only after it has passed the check.

    Args:
        address: the URL to fetch.
        path: where to put the file. Folders are created as needed.
        check: raises ValueError for a file that is not what it should be.

    Raises:
        DownloadError: there is no connection or no such file, or the file cannot be written.
        ValueError: the file that was sent did not pass the check.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            with (
                urllib.request.urlopen(address, timeout=_TIMEOUT) as answer,
                temporary.open("wb") as file,
            ):
                shutil.copyfileobj(answer, file)
            check(temporary)
    except ValueError as error:
        raise ValueError(
            f"{address} sent a file that is damaged or not the original: try again later, or get"
            f" it elsewhere and put it into {path.parent}"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        reason = error.reason if type(error) is urllib.error.URLError else error
        raise DownloadError(" ".join(str(reason).split())) from error
