"""The two sides mirror each other: same file, same functions, same signatures, same order."""

import ast
from pathlib import Path

import pytest
from dropless.parity import STAGES

ROOT = Path(__file__).parents[1]
PAIRS = [
    (reference, side / reference.name)
    for reference in sorted((ROOT / "reference").glob("*.py"))
    for side in (ROOT / "optimized/xla", ROOT / "optimized/te")
    if (side / reference.name).exists() and reference.name != "__init__.py"
]
BOTH_LAYOUTS = {"te/fp8.py", "te/mxfp8.py", "te/recipes.py"}
"""TE quantises both layouts of a tensor in one pass, where the reference takes one axis: no function of these is the same."""


def _functions(path: Path) -> list[tuple[str, str]]:
    """(name, parameters) of the public functions that a file defines, in order.

    Annotations may differ, and so may options of what is no stage.
    """
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            if node.name not in STAGES:
                node.args.kwonlyargs, node.args.kw_defaults = [], []
            found.append((node.name, ast.unparse(node.args)))
    return found


def test_there_is_something_to_compare():
    assert {path.name for path, _ in PAIRS} >= {"permute.py", "grouped_gemm.py", "experts.py"}


@pytest.mark.parametrize(("reference", "optimized"), PAIRS, ids=[str(o.relative_to(ROOT)) for _, o in PAIRS])
def test_functions_mirror_the_reference(reference, optimized):
    """What both files offer has one signature; stages stand in the reference's order, however many each file offers."""
    ours, theirs = _functions(reference), _functions(optimized)
    shared = [name for name, _ in theirs if name in dict(ours)]
    assert bool(shared) != ("/".join(optimized.parts[-2:]) in BOTH_LAYOUTS), f"{optimized} beside {reference}: {shared}"
    for name in shared:
        assert dict(theirs)[name] == dict(ours)[name], name
    in_order = [name for name, _ in ours if name in shared]
    assert [name for name in in_order if name in STAGES] == [name for name in shared if name in STAGES]


def test_every_stage_is_documented():
    for path in (*(ROOT / "reference").glob("*.py"), *(ROOT / "optimized").glob("*/*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name in STAGES:
                assert ast.get_docstring(node), f"{path.relative_to(ROOT)}: {node.name}"
