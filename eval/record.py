"""What the JSON of a script begins with."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from vmonarch.pipelines.environment import environment, shown_command


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
