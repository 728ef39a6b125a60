"""What all settings classes share: a rule for each field, its flag, and the error messages."""

import dataclasses
import math
from collections.abc import Generator
from typing import Any, Literal

Resume = Literal["refused", "allowed", "per start"]


class SettingError(ValueError):
    """A flag, setting or data set cannot be used. The message says why and what to do."""


def setting(
    default: Any, *, least: float | None = None, resume: Resume = "refused", meaning: str = ""
) -> Any:
    """A field of a settings class with rules.

    `least` is the smallest allowed number (the value None is always allowed). `resume` says what
    happens when a run is resumed with another value. "refused": an error, as for a field without
    rules. "allowed": the log shows the change, and `meaning` if given. "per start": the setting
    belongs to one start of the run, so its values are not compared.
    """
    rules = {"least": least, "resume": resume, "meaning": meaning}
    return dataclasses.field(default=default, metadata=rules)


def check_minima(config: Any) -> None:
    """Raise SettingError for the first number that is below its `least` or not finite."""
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
    """The dotted name, such as 'optimizer.learning_rate', the field and the value of each one."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, name + ".")
        else:
            yield name, field, list(value) if isinstance(value, tuple) else value


def build(cls: type, values: dict[str, Any]) -> Any:
    """A settings class, which may be nested, from JSON. Unknown names in the JSON are ignored."""
    fields = {}
    for field in dataclasses.fields(cls):
        if field.name in values:
            value = values[field.name]
            if dataclasses.is_dataclass(field.default):
                value = build(type(field.default), value)
            fields[field.name] = tuple(value) if isinstance(value, list) else value
    return cls(**fields)
