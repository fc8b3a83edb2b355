"""Who may import whom, and what importing costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "parity": set(),
    "reference": {"parity"},
    "optimized/xla": {"parity"},
    "optimized/te": {"parity", "optimized/xla"},
}
HEAVY = ("transformer_engine", "hypothesis", "pytest", "matplotlib", "torch")


def _imports(path: Path, package: str) -> set[str]:
    """Absolute names of the modules that a file imports anywhere, relative imports resolved."""
    found = set()
    parts = package.split(".")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            stem = ".".join(filter(None, (base, node.module or "")))
            found |= {stem} | {f"{stem}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_what_it_may(folder):
    package = "dropless." + folder.replace("/", ".")
    files = sorted((ROOT / folder).glob("*.py"))
    assert files, f"{folder} holds no Python files"
    allowed = {f"dropless.{name.replace('/', '.')}" for name in (FOLDERS[folder] | {folder})}
    for path in files:
        for name in _imports(path, package):
            if name.startswith("dropless.") and name not in ("dropless.optimized",):
                assert any(name == a or name.startswith(a + ".") for a in allowed), f"{path.name} imports {name}"
            top = name.partition(".")[0]
            assert top not in ("parity", "reference", "optimized"), f"{path.name} imports {name} as a top-level package"


@pytest.mark.parametrize(
    "modules", ["dropless.parity, dropless.reference", "dropless.parity.cli", "dropless.optimized.te"]
)
def test_importing_brings_in_nothing_heavy(modules):
    code = f"import sys, {modules}\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_importing_works_where_nothing_heavy_is_installed():
    block = (
        "import sys, importlib.abc\n"
        "class Block(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {HEAVY!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import dropless.parity, dropless.reference\n"
        "from dropless.parity import registry\n"
        "print(registry.get('loop_and_pad').name)\n"
    )
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "loop_and_pad"


def test_the_registry_lists_names_without_importing_an_implementation():
    code = "import sys, dropless.parity as p\nprint(len(p.names()), [m for m in sys.modules if m.startswith(('dropless.reference', 'dropless.optimized'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, _, loaded = done.stdout.strip().partition(" ")
    assert int(count) >= 11
    assert loaded == "[]"
