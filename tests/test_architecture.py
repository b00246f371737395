"""No modules of the two packages import each other in a circle; contracts in pyproject.toml order the packages."""

from __future__ import annotations

import grimp


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
