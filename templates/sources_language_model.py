"""What the text is read from: --data.path, or the source code of Python's standard library."""

from dataclasses import dataclass

from ..runtime.settings import setting


@dataclass(frozen=True)
class DataConfig:
    path: str | None = setting(None, resume="allowed")
    """Your own text; README.md says in which forms (default: Python's standard library)."""
    workers: int | None = setting(None, least=0, resume="allowed")
    """Threads that prepare batches ahead (default: 0, prepared in the loop: best for text)."""

    def check(self) -> None:
        """Raise SettingError for a setting that cannot be used."""
