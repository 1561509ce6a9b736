"""The log of a service: lines on stderr, for people or (`--log-format json`) for programs."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable
from datetime import datetime, timezone


class JsonLines(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, and exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, timezone.utc)
        found = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False)


def log_to_stderr(level: str, form: str, warnings: Iterable[str]) -> None:
    """Begins the log, with warnings of what came before it."""
    handler = logging.StreamHandler(sys.stderr)
    as_text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else as_text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for said in warnings:
        logging.warning("%s", said)
