"""Public names, and no imports in a circle; contracts in pyproject.toml order the packages."""

from __future__ import annotations

import inspect

import grimp

import layerskip

PUBLIC = {"load_target", "generate", "measure", "save_draft_checkpoint", "Sampling", "PromptSet", "Measurement"}


def test_no_modules_import_each_other_in_a_circle() -> None:
    packages = "layerskip", "searches"
    graph = grimp.build_graph(*packages, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 100
    while leaves := {module for module, imported in imports.items() if not imported & imports.keys()}:
        for module in leaves:
            del imports[module]
    # Packages import their own modules: `import layerskip` runs its __init__.
    assert imports.keys() <= {*packages}


def test_all_public_names_exist_and_are_documented_and_all_errors_are_value_errors() -> None:
    """A program can catch ValueError for any invalid input."""
    assert set(layerskip.__all__) >= PUBLIC
    for name in layerskip.__all__:
        value = getattr(layerskip, name)
        assert inspect.getdoc(value), name
        assert not (isinstance(value, type) and issubclass(value, Exception)) or issubclass(value, ValueError)
