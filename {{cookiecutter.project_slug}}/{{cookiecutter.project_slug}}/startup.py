"""The first half second of a command: signals, a line, and whether an accelerator goes unused."""

import itertools
import sys

from . import accelerators, stop


def prepare() -> None:
    """Take stop requests and say what the wait is for, before anything heavy is imported.

    Ends the process with exit code 2 when the project was generated for an accelerator that is
    there, and JAX cannot use it.
    """
    stop.install_handlers()
    words = sys.argv[1:]
    if not {"--help", "-h", "--quiet", "--json"} & set(words):
        print("loading JAX and Flax ...", file=sys.stderr, flush=True)
    unused = accelerators.unused_accelerator(platform_of(words))
    if unused:
        print(f"{'error' if unused.wanted else 'warning'}: {unused}", file=sys.stderr, flush=True)
        if unused.wanted:
            sys.exit(stop.BAD_SETTING)


def platform_of(words: list[str]) -> str:
    """The value of --platform, which is read again with all other flags."""
    for word, following in itertools.pairwise([*words, ""]):
        name, _, value = word.partition("=")
        if name == "--platform":
            return value or following
    return "auto"
