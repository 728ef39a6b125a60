"""Which module may import which: runtime/ knows nothing of what you edit above it."""

import ast
from pathlib import Path

from smoke import PACKAGE

ROOT = Path(__file__).parent.parent / PACKAGE


def imports(root: Path) -> dict[str, set[str]]:
    """The modules of the package that each of its modules imports, by names as in runtime.stop."""
    files = {name_of(file.relative_to(root)): file for file in root.rglob("*.py")}
    found: dict[str, set[str]] = {name: set() for name in files}
    for name, file in files.items():
        place = list(file.relative_to(root).parts)  # a package's own modules are below its name
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            found[name] |= set(targets(node, place, root.name)) & files.keys() - {name}
    return found


def name_of(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def targets(node: ast.AST, place: list[str], package: str):
    """What a statement may import of the package: each name may be a module or in one."""
    if isinstance(node, ast.Import):
        yield from (x.name.removeprefix(f"{package}.") for x in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = node.module or ""
        base = place[: len(place) - node.level] if node.level else []
        base += [part for part in module.split(".") if part]
        if not node.level and base[:1] == [package]:
            base = base[1:]
        yield ".".join(base)
        yield from (".".join([*base, x.name]) for x in node.names)


def breaches(found: dict[str, set[str]]) -> list[str]:
    """A line for each import that breaks the rule of the three wings, and for each circle."""
    lines = []
    for name, others in found.items():
        for other in sorted(others):
            below_config = name.startswith("runtime.") and other != "config"
            if below_config and not other.startswith("runtime"):
                lines.append(f"{name} imports {other}: runtime/ may import config and itself only")
            if other.startswith("tools") and not name.startswith("tools"):
                lines.append(f"{name} imports {other}: nothing may import tools/")
    remaining = dict(found)
    while free := [name for name, others in remaining.items() if not others & remaining.keys()]:
        for name in free:
            del remaining[name]
    if remaining:
        lines.append(f"these modules import each other in a circle: {', '.join(sorted(remaining))}")
    return lines


def test_the_wings_keep_to_their_rule():
    assert breaches(imports(ROOT)) == []


def test_a_breach_is_found(tmp_path):
    root = tmp_path / "net"
    (root / "runtime").mkdir(parents=True)
    (root / "tools").mkdir()
    (root / "task.py").write_text("from .tools.bench import main\n")
    (root / "tools/bench.py").write_text("from ..task import loss\n")
    (root / "runtime/stop.py").write_text("def poll():\n    from net import task\n")
    assert {line.partition(":")[0] for line in breaches(imports(root))} == {
        "runtime.stop imports task",
        "task imports tools.bench",
        "these modules import each other in a circle",
    }
