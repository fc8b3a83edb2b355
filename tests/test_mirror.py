"""The two sides mirror each other: same file, same stage functions, same signatures, same order."""

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


def _stages(path: Path) -> list[tuple[str, str]]:
    """(name, parameters) of the stage functions that a file defines, in order; annotations may differ."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in STAGES:
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            found.append((node.name, ast.unparse(node.args)))
    return found


def test_there_is_something_to_compare():
    assert {path.name for path, _ in PAIRS} >= {"permute.py", "grouped_gemm.py", "experts.py"}


@pytest.mark.parametrize(("reference", "optimized"), PAIRS, ids=[str(o.relative_to(ROOT)) for _, o in PAIRS])
def test_stage_functions_mirror_the_reference(reference, optimized):
    """What the optimized file offers has the reference's signature and stands in the reference's order."""
    ours, theirs = _stages(reference), _stages(optimized)
    assert theirs, f"{optimized} offers no stage"
    assert [s for s in ours if s[0] in dict(theirs)] == theirs


def test_every_stage_is_documented():
    for path in (*(ROOT / "reference").glob("*.py"), *(ROOT / "optimized").glob("*/*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name in STAGES:
                assert ast.get_docstring(node), f"{path.relative_to(ROOT)}: {node.name}"
