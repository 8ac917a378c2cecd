"""Where and when a figure was measured: what is kept beside every one."""

import datetime
import os
import platform
from pathlib import Path


def here_and_now() -> dict[str, str | int]:
    """The date (UTC), the cores this process may use, the processor, the architecture, Python's version."""
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    """Its name, as Linux gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
