"""The first half second of a command: signals, a line, and whether an accelerator goes unused."""

import itertools
import sys
from typing import Any

from . import accelerators, stop, terminal


def prepare(takes_requests: bool = True) -> None:
    """Take stop requests and say what the wait is for, before anything heavy is imported.

    A command that has nothing to save takes no requests: a signal ends it. This ends the process
    with exit code 2 when the project was generated for an accelerator that is there, and JAX cannot
    use it.
    """
    if takes_requests:
        stop.install_handlers()
    screen: Any = terminal.Screen(sys.stderr)
    words = sys.argv[1:]
    if not {"--help", "-h", "--quiet", "--json"} & set(words):
        print("loading JAX and Flax ...", file=screen, flush=True)
    unused = accelerators.unused_accelerator(platform_of(words))
    if unused:
        print(f"{'error' if unused.wanted else 'warning'}: {unused}", file=screen, flush=True)
        if unused.wanted:
            sys.exit(stop.BAD_SETTING)


def platform_of(words: list[str]) -> str:
    """The value of --platform, which is read again with all other flags."""
    for word, following in itertools.pairwise([*words, ""]):
        name, _, value = word.partition("=")
        if name == "--platform":
            return value or following
    return "auto"
