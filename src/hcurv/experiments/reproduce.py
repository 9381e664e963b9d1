"""Measure a table of the paper again, row by row, and write it to files.

A row that is already in the results with the same settings is not measured again, so that an
interrupted run continues where it stopped.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import time
from datetime import datetime, timezone
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy
import scipy
import torch
from tqdm import tqdm

import hcurv
from hcurv.experiments.measure import peak_extra_bytes
from hcurv.experiments.tables import TABLES, Table
from hcurv.files import write_atomically
from hcurv.memory import format_bytes

__all__ = ["TABLES", "reproduce"]

_FORMAT = 1


def reproduce(
    name: str,
    folder: Path,
    *,
    quick: bool = False,
    data: str | None = None,
    progress: bool = False,
) -> Path:
    """Measure the rows that are missing and write ``<name>.json``, ``.md`` and ``.png``.

    Args:
        name: one of `TABLES`.
        folder: where the files go. It is created if necessary.
        quick: small networks on scikit-learn's digits, in less than a minute.
        data: the folder with the data sets, as for `hcurv.experiments.datasets`.
        progress: show a bar over the rows.

    Returns:
        The path of the rendered table.

    Raises:
        ValueError: there is no such table, or the folder holds other results under its name.
    """
    if name not in TABLES:
        raise ValueError(f"no table {name!r}: choose one of {', '.join(TABLES)}")
    table = TABLES[name]
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-quick" if quick else name
    path = folder / f"{stem}.json"
    wanted = table.rows(quick)
    known = _read(path, table)
    known = {key: row for key, row in known.items() if row["settings"] == wanted.get(key)}
    bar = tqdm(wanted.items(), unit="row", disable=not progress)
    for key, settings in bar:
        bar.set_description(key)
        if key not in known:
            known[key] = _measure(table, settings, data)
            _write(path, table, quick, {k: known[k] for k in wanted if k in known})
    _write(path, table, quick, {k: known[k] for k in wanted})
    rows = [known[key] for key in wanted]
    _draw(folder / f"{stem}.png", table, rows)
    target = folder / f"{stem}.md"
    text = _markdown(table, stem, quick, rows)
    write_atomically(target, lambda name: Path(name).write_text(text, encoding="utf-8"))
    return target


def _measure(table: Table, settings: dict[str, Any], data: str | None) -> dict[str, Any]:
    """Measure one row, and record everything that is needed to judge or repeat it."""
    found: list[dict[str, Any]] = []
    start = time.perf_counter()
    peak = peak_extra_bytes(lambda: found.append(table.measure(settings, data)))
    return {
        "settings": settings,
        "values": found[0],
        "seconds": time.perf_counter() - start,
        "peak_bytes": peak,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {
            "hcurv": hcurv.__version__,
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "scipy": scipy.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "processor": platform.machine(),
            "system": platform.system(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
    }


def _commit() -> str | None:
    """Return the commit of the source tree in use, marked "dirty" if the tree has changes."""
    here = Path(__file__).parent
    try:
        state = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return state.stdout.strip() or None


def _read(path: Path, table: Table) -> dict[str, dict[str, Any]]:
    """Read the rows of an earlier run."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = content["rows"]
        fits = content["format"] == _FORMAT and content["table"] == table.name
        fits = fits and all("settings" in row and "values" in row for row in rows.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        fits = False
    if not fits:
        raise ValueError(f"{path} holds no results of table {table.name!r}: move it away")
    return dict(rows)


def _write(path: Path, table: Table, quick: bool, rows: dict[str, dict[str, Any]]) -> None:
    content = {
        "format": _FORMAT,
        "table": table.name,
        "number": table.number,
        "title": table.title,
        "quick": quick,
        "rows": _plain(rows),
    }
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, lambda name: Path(name).write_text(text, encoding="utf-8"))


def _plain(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _markdown(table: Table, stem: str, quick: bool, rows: list[dict[str, Any]]) -> str:
    rendered = table.render([(row["settings"], row["values"]) for row in rows])
    lines = [f"## {table.heading}", ""]
    if quick:
        lines += ["A quick run on small networks: not the paper's.", ""]
    lines += ["| " + " | ".join(rendered.header) + " |", "|" + "---|" * len(rendered.header)]
    lines += ["| " + " | ".join(cells) + " |" for cells in rendered.rows]
    seconds = sum(row["seconds"] for row in rows)
    parts = (part for row in rows for part in (row, *row["values"].values()))
    peak = max(
        part["peak_bytes"] for part in parts if isinstance(part, dict) and "peak_bytes" in part
    )
    commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in rows))
    threads = ", ".join(dict.fromkeys(str(row["machine"]["threads"]) for row in rows))
    memory = f", peak memory {format_bytes(peak)}" if peak >= 0 else ""
    command = f"hcurv reproduce {table.name}" + (" --quick" if quick else "")
    lines += ["", table.notes, ""]
    lines += [
        f"By `{command}`: {seconds:.0f} s{memory}, threads: {threads}, commit: {commits};"
        f" all values in [{stem}.json]({stem}.json).",
        "",
        f"![{table.title}]({stem}.png)",
    ]
    return "\n".join(lines) + "\n"


def _draw(path: Path, table: Table, rows: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    # Narrow, so that its text can be read on a phone.
    figure = Figure(figsize=(4.8, 5.2), layout="constrained")
    table.draw(figure, [(row["settings"], row["values"]) for row in rows])
    figure.suptitle(fill(table.heading, 50), fontsize=11)
    write_atomically(path, lambda name: figure.savefig(name, dpi=180, format="png"))
