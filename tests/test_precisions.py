"""`compare --precision` with several names: what it accepts, what it counts, and what it shows."""

import pytest
from dropless.parity import complete, get
from dropless.parity.cli import app
from dropless.parity.inputs import make_case
from dropless.parity.precisions import (
    NAMES,
    compare_precisions,
    in_precision,
    measure,
    operand_bytes,
    sensitivity_of,
    several,
)
from dropless.parity.precisions import _oracle as exact_of
from dropless.parity.problem import InvalidInput, Problem
from typer.testing import CliRunner

SMALL = Problem(T=12, K=2, E=3, D=64, F=32)


@pytest.mark.parametrize("text", ["highest", "tf32"])
def test_one_precision_of_float32_products_is_not_a_list(text):
    assert several(text) == ()


def test_a_list_is_read_once_and_in_order():
    assert several("bf16, mxfp8,fp8-current,bf16") == ("bf16", "mxfp8", "fp8-current")
    assert several("nvfp4") == ("nvfp4",)


@pytest.mark.parametrize("text", ["fp7", "bf16,", "bf16,tf32", ""])
def test_an_unknown_precision_is_refused_in_one_line(text):
    with pytest.raises(InvalidInput) as refused:
        several(text)
    said = str(refused.value)
    assert "\n" not in said and "accepted: highest or tf32, or a list of fp32" in said


def test_the_command_refuses_a_bad_precision_with_exit_code_2():
    result = CliRunner().invoke(app, ["compare", "--precision", "bf16,fp7"], catch_exceptions=False)
    assert result.exit_code == 2
    assert "precision is 'fp7'; accepted: highest or tf32" in " ".join(result.stderr.split())


def test_bytes_of_operands_with_their_scales():
    """R = 24 rows; x 24 x 64, wi 3 x 64 x 64, h 24 x 32, wo 3 x 32 x 64."""
    values = 24 * 64 + 3 * 64 * 64 + 24 * 32 + 3 * 32 * 64
    assert operand_bytes(SMALL.replace(dtype="bfloat16")) == 2 * values
    assert operand_bytes(SMALL.replace(recipe="mxfp8")) == values + values // 32
    assert operand_bytes(SMALL.replace(recipe="nvfp4")) == values // 2 + values // 16
    assert operand_bytes(SMALL.replace(recipe="fp8-current")) == values + 4 * 4 * 3


def test_every_name_is_a_problem_and_keeps_the_routing():
    case = make_case(SMALL, seed=1)
    for name in NAMES:
        at = in_precision(case, name)
        assert (at.routing.topk_idx == case.routing.topk_idx).all()
        assert at.problem.recipe == (name if "fp8" in name or "fp4" in name else "none")


def test_a_recipe_is_shown_beside_bfloat16_within_its_bars_and_errs_more(capsys):
    case = make_case(SMALL, seed=1)
    found = {}
    for name in ("bf16", "mxfp8"):
        at = in_precision(case, name)
        found[name] = measure(complete(get("blocked")), at, exact_of(at), name, timed=False)
    assert all(m.percent_of_bar is not None and m.percent_of_bar <= 60 for m in found.values())
    assert found["mxfp8"].error["y"] > 3 * found["bf16"].error["y"]
    assert found["mxfp8"].operand_bytes < found["bf16"].operand_bytes
    assert compare_precisions(case, ["bf16"], [complete(get("blocked"))], timed=False)
    shown = capsys.readouterr().out
    assert "bf16" in shown and "blocked" in shown


def test_sensitivity_separates_operands():
    """Without quantised operands bfloat16 remains; gradients alone leave y alone; all of them cost the most."""
    found = sensitivity_of(make_case(SMALL, seed=1), "fp8-current")
    assert found["gradient"]["y"] == found["none"]["y"] < found["activation"]["y"]
    assert found["all"]["y"] > max(found["activation"]["y"], found["kernel"]["y"])
    assert found["gradient"]["x"] > found["none"]["x"]
