"""The structure of the code: imports without circles, and plain module docstrings."""

from __future__ import annotations

import ast
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("layerskip", "searches")
MODULES = sorted(path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py"))
SCRIPTS = sorted((REPOSITORY / "docs").rglob("*.py"))


def _name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, known: set[str]) -> set[str]:
    """The modules of this repository that a module imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & known) or {str(node.module)}
    return (found & known) - {_name(path)}


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {_name(path): path for path in MODULES}
    graph = {name: _imports(path, set(names)) for name, path in names.items()}
    while leaves := {name for name, imported in graph.items() if not imported & graph.keys()}:
        for name in leaves:
            del graph[name]
    # Packages import their own modules: `import layerskip` runs its __init__.
    assert not {name for name in graph if name not in PACKAGES}


def test_no_docstring_is_a_question() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in MODULES:
        nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, documented)]
        assert not [text for node in nodes if "?" in (text := ast.get_docstring(node) or "").replace("???", "")], path


def test_every_module_has_a_docstring() -> None:
    assert len(SCRIPTS) == 2
    for path in (*MODULES, *SCRIPTS):
        text = path.read_text(encoding="utf-8")
        assert path.name == "__init__.py" or ast.get_docstring(ast.parse(text)), path
