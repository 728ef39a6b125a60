"""What the images and labels are read from: --data.path, or the digits that come with the code."""

from dataclasses import dataclass

from ..runtime.settings import setting


@dataclass(frozen=True)
class DataConfig:
    path: str | None = setting(None, resume="allowed")
    """Your own data; README.md says in which forms (default: the built-in digits)."""
    workers: int = setting(0, least=0, resume="allowed")
    """Threads that prepare batches ahead (0 = prepared in the loop: best for data in memory)."""
