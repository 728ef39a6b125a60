"""The answers that the tests give to the template's questions: one list of each kind."""

import itertools
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))

TASKS, APIS, ACCELERATORS = (SETTINGS[name] for name in ("task", "flax_api", "accelerator"))
COMBINATIONS = list(itertools.product(TASKS, APIS))
# One of each task and each API: where the others would add little, or only to the slow tests.
TWO_COMBINATIONS = [COMBINATIONS[0], COMBINATIONS[3]]

GOOD = {
    "project_name": "My Flax Project",
    "project_slug": "my_flax_project",
    "author_name": "Your Name",
    "task": "image_classification",
    "flax_api": "linen",
    "accelerator": "cpu",
    "smoke_test": "off",
}

# Backslashes, every kind of quote, Jinja in all its forms, what a shell expands, other scripts.
NASTY = [
    'O\'Brien "Bob" \\x',
    "Zoë 🍪 O'Brien",
    "你好",
    "{{ 7*7 }}",
    "{% raw %}",
    "{# gone #}",
    "{ë{{{🍪}}}",
    "{",
    "}}",
    "$(touch PWNED) `touch PWNED` $HOME & ; | > < * ? ! ~ #",
    "%s %d 100%",
    "ends in a backslash \\",
    '"""+__import__("os").system("touch PWNED")+r"""',
    "'''+__import__('os').system('touch PWNED')+'''",
    "\\u0041\\n\\N{BULLET}",
    "=a=b=",
    "family 👨‍👩‍👧 \u200f",
]


def shown(value):
    """The name of a test with this answer."""
    return ascii(value)[:30]
