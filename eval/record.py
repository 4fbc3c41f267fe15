"""What scripts have in common: how they are called, and what their JSON begins with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from vmonarch.configs.methods import OLD_METHODS, OLD_RECIPES
from vmonarch.pipelines.environment import environment, shown_command

# The day since which methods and recipes have their present names.
_RENAMED = "2026-11-28"


def script_parser(name: str, doc: str | None, *, whole: bool = False) -> argparse.ArgumentParser:
    """A parser for `python -m vmonarch.eval.NAME`.

    Args:
        doc: of the module, whose first line is the description; all of it with `whole`.
    """
    return argparse.ArgumentParser(
        prog=f"python -m vmonarch.eval.{name}",
        description=doc if whole else (doc or "").partition("\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def script_record(name: str, arguments: Sequence[str] | None, device: Any) -> dict[str, Any]:
    """When and where a script runs, with what and how it was called; ask before it takes its time.

    Args:
        arguments: None for those of this process.
    """
    about = environment(device)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": f"{about['device_name']}, {about['cpu_count']} cores",
        "environment": about,
        "command": shown_command(("python", "-m", f"vmonarch.eval.{name}"), arguments),
    }


def names_now(results: Any, old: bool = False) -> Any:
    """What a JSON of ours holds, with the names that methods and recipes have now; commands stay as they were called.

    Args:
        old: whether it is of before they got them, where no date in it says so.
    """
    if isinstance(results, dict):
        made = results.get("date", results.get("created"))
        old = old if made is None else made < _RENAMED
        return {names_now(key, old): names_now(value, old) for key, value in results.items()}
    if isinstance(results, list):
        return [names_now(value, old) for value in results]
    if old and isinstance(results, str):
        name, colon, options = results.partition(":")
        return (OLD_METHODS | OLD_RECIPES).get(name, name) + colon + options
    return results
