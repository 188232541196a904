"""``hicache-guard dashboard``: the Grafana dashboard for the guard's counters."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from hicache_guard.core.errors import ConfigError


def dashboard(
    file: Annotated[
        Path | None, typer.Argument(help="Where to write it. Default: print it.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace a file that is there.")] = False,
) -> None:
    """Print or write a Grafana dashboard over the Prometheus that scrapes SGLang."""
    text = resources.files("hicache_guard").joinpath("dashboards/grafana.json").read_text()
    if file is None:
        print(text, end="")
        return
    try:
        with file.open("w" if force else "x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ConfigError(f"{str(file)!r} is there already; --force replaces it") from None
    except OSError as error:
        raise ConfigError(f"cannot write {str(file)!r}: {error.strerror}") from None
