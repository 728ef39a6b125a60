"""What a command does before its slow imports: signal handlers, a line, a check of the hardware."""

import itertools
import sys
from typing import Any

from . import accelerators, stop, terminal


def prepare(takes_requests: bool = True) -> None:
    """Handle stop requests from now on, and print what the wait for the imports is for.

    With `takes_requests` False, for a command that has nothing to save, signals end the process.
    Exits with code 2 if the project was generated for an accelerator that this machine has and the
    installed JAX cannot use.
    """
    if takes_requests:
        stop.install_handlers()
    else:
        stop.end_at_once()
    screen: Any = terminal.Screen(sys.stderr)
    words = sys.argv[1:]
    if "--json" in words:
        terminal.reserve_stdout()
    if not {"--help", "-h", "--quiet", "--json"} & set(words):
        print("loading JAX and Flax ...", file=screen, flush=True)
    unused = accelerators.unused_accelerator(platform_of(words))
    if unused:
        kind = "error" if unused.is_wanted else "warning"
        print(f"{kind}: {unused}", file=screen, flush=True)
        if unused.is_wanted:
            sys.exit(stop.BAD_SETTING)


def platform_of(words: list[str]) -> str:
    """The value of --platform. The flags as a whole are parsed later, by tyro."""
    for word, following in itertools.pairwise([*words, ""]):
        name, _, value = word.partition("=")
        if name == "--platform":
            return value or following
    return "auto"
