"""What every class of settings shares: rules beside each field, flags, and messages about them."""

import dataclasses
import math
from collections.abc import Generator
from typing import Any, Literal

Resume = Literal["refused", "allowed", "per start"]


class SettingError(ValueError):
    """A flag, setting or data set that cannot be used: the message says why and what to do."""


def setting(
    default: Any, *, least: float | None = None, resume: Resume = "refused", meaning: str = ""
) -> Any:
    """A field of a settings class, with its rules beside it.

    `least` is the smallest allowed number (None as a value is always allowed). `resume` says what
    happens when a run is resumed with another value: it is refused, as for a plain default; it is
    allowed, and the log says so with its `meaning`; or the setting belongs to one start of a run
    and is not compared.
    """
    rules = {"least": least, "resume": resume, "meaning": meaning}
    return dataclasses.field(default=default, metadata=rules)


def check_minima(config: Any) -> None:
    """Raise SettingError for the first number below its minimum, or one that is not finite."""
    for name, field, value in fields_of(config):
        least = field.metadata.get("least")
        if least is not None and value is not None:
            require(least <= value < math.inf, name, value, f"at least {least}")


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Raise SettingError naming the flag, its value and the rule, unless the rule holds."""
    if not holds:
        raise SettingError(f"{flag(name)} {value}: must be {rule}")


def flag(name: str) -> str:
    """'optimizer.learning_rate' as it is typed on the command line."""
    return "--" + name.replace("_", "-")


def fields_of(config: Any, prefix: str = "") -> Generator[tuple[str, dataclasses.Field, Any]]:
    """Each setting as its dotted name, such as 'optimizer.learning_rate', its field and value."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, name + ".")
        else:
            yield name, field, value


def build(cls: type, values: dict[str, Any]) -> Any:
    """A (nested) settings class from JSON; settings that it no longer has are left out."""
    fields = {}
    for field in dataclasses.fields(cls):
        if field.name in values:
            value = values[field.name]
            if dataclasses.is_dataclass(field.default):
                value = build(type(field.default), value)
            fields[field.name] = tuple(value) if isinstance(value, list) else value
    return cls(**fields)
