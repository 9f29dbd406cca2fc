"""What can be shown as values, as JSON and as a page of its own."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, SupportsFloat

from stretto.page.text import finite


class Document(ABC):
    """A report. A class of one says what it holds and draws its page."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything, in plain values."""

    @abstractmethod
    def page(self) -> str:
        """The whole page."""

    def to_json(self, path: str | Path | None = None) -> str:
        """The values as JSON, also written to `path`."""
        text = json.dumps(finite(self.to_dict()), indent=1, default=_plain)
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    def to_html(self, path: str | Path) -> None:
        """One self-contained page."""
        Path(path).write_text(self.page())


def _plain(value: Any) -> float | str:
    """What JSON has no word for, as a number where it is one."""
    return float(value) if isinstance(value, SupportsFloat) else str(value)
