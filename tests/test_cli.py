"""The command line: what works without arguments, what is refused in one line, and what never leaves a half-written file."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from dropless.parity import options, registry, running, stages, timing
from dropless.parity.cli import app, usage_line
from dropless.parity.inputs import make_case
from dropless.parity.problem import Problem
from dropless.parity.records import read
from dropless.parity.running import QUICK_COMPILE
from typer.testing import CliRunner

SMALL = ["--tokens", "16", "--experts", "4", "--topk", "2", "--width", "8", "--expert-width", "8"]


def run(*arguments: str, columns: int = 100):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": str(columns)}, catch_exceptions=False)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # These runs are tiny and few: half the compile time matters, the speed of the code does not.
    monkeypatch.setattr(timing, "COMPILER_OPTIONS", QUICK_COMPILE)
    monkeypatch.setattr(running, "OPTIONS", QUICK_COMPILE)


def one_line(result, code: int = 2) -> str:
    assert result.exit_code == code, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("dropless:")]
    assert len(lines) == 1
    assert "Traceback" not in result.output
    return lines[0]


def test_compare_agrees_times_and_writes_a_record(tmp_path):
    result = run("compare", *SMALL, "--impl", "blocked", "--out", "r.json", "--save-trace", "t.npz")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 100
    json.loads(Path("r.json").read_text())
    case = read("r.json").cases[0]
    found = case.result("blocked")
    assert found.verdict == "agree", found.reason
    judged = {f.tensor for f in found.findings if f.stage == "experts"}
    assert judged == {"y", "x", "topk_weights", "wi", "wo"}
    assert {f.tensor for f in found.findings if f.stage == "layer"} >= {"y", "gate_kernel", "wi", "balance", "z"}
    assert {t.what for t in found.timings} == {"experts forward", "experts forward+backward"}
    assert found.after, "the timed outputs were not judged"
    replay = ["--trace", "t.npz", "--impl", "loop_and_pad", "--no-timing", "--no-grad", "--out", "s.json"]
    again = run("compare", *SMALL[2:4], *SMALL[6:], *replay)
    assert again.exit_code == 0, again.output
    assert read("s.json").cases[0].group_sizes == case.group_sizes
    assert not read("s.json").cases[0].results[0].timings


def test_compare_on_text_repeats_rows_as_words_do():
    Path("poem.txt").write_text("the cat and the dog and the bird " * 4)
    arguments = ["--text", "poem.txt", "--impl", "loop_and_pad", "--no-grad", "--no-timing", "--out", "r.json"]
    result = run("compare", *SMALL, *arguments)
    assert result.exit_code == 0, result.output
    case = read("r.json").cases[0]
    assert "poem.txt" in case.source
    assert sum(case.group_sizes) == 32


def test_nan_in_x_stays_in_its_rows():
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    x[3, 2] = np.nan
    np.save("x.npy", x)
    result = run("compare", *SMALL, "--x", "x.npy", "--impl", "blocked", "--out", "r.json")
    assert result.exit_code == 0, result.output
    assert "gradients are left out" in result.output
    assert read("r.json").cases[0].result("blocked").verdict == "agree"


def leaky(problem, params, x, routing):
    """Lets one token's NaN into every row."""
    y = registry.get("loop_and_pad").stage("experts")(problem, params, x, routing)
    return y + jnp.sum(x - x).astype(y.dtype)


def test_nan_that_spreads_is_a_disagreement():
    x = np.ones((16, 8), np.float32)
    x[3, 2] = np.nan
    np.save("x.npy", x)
    result = run("compare", *SMALL, "--x", "x.npy", "--impl", f"{__name__}:leaky", "--out", "r.json")
    assert result.exit_code == 1, result.output


def one_percent_off(problem, params, x, routing):
    """A 1 % error everywhere."""
    y = registry.get("loop_and_pad").stage("experts")(problem, params, x, routing)
    return y * jnp.asarray(1.01, y.dtype)


def loses_a_token(problem, params, x, routing):
    """Drops the last token."""
    y = registry.get("loop_and_pad").stage("experts")(problem, params, x, routing)
    return y.at[-1].set(0)


def raises(problem, params, x, routing):
    """Fails."""
    raise RuntimeError("no kernel\nfor this")


@pytest.mark.parametrize(
    ("target", "dtype"),
    # At 8 columns 1 % lies within bfloat16's own rounding, so no judge could tell.
    [
        ("one_percent_off", "float32"),
        ("loses_a_token", "float32"),
        ("loses_a_token", "bfloat16"),
        ("raises", "float32"),
    ],
)
def test_wrong_layers_disagree_and_are_never_timed(target, dtype):
    arguments = ["--impl", f"{__name__}:{target}", "--dtype", dtype, "--no-grad", "--out", "r.json"]
    result = run("compare", *SMALL, *arguments)
    assert result.exit_code == 1, result.output
    found = read("r.json").cases[0].results[0]
    assert found.verdict == "disagree"
    assert not found.timings
    assert "Traceback" not in result.output


def test_a_layer_that_drops_is_expected_different_and_says_how_much():
    result = run("compare", *SMALL, "--impl", "capacity", "--no-grad", "--out", "r.json")
    assert result.exit_code == 0, result.output
    found = read("r.json").cases[0].results[0]
    assert found.verdict == "expected-different"
    assert "exactly those that it reports" in found.reason


BAD = {
    "top-k above experts": (["--experts", "4", "--topk", "5"], "top-k is 5; accepted: 1 to the number of experts, 4"),
    "top-k zero": (["--topk", "0"], "top-k is 0"),
    "groups": (["--experts", "10", "--topk", "2", "--groups", "4"], "--groups is 4 for 10 experts"),
    "preset": (["--preset", "nope"], "preset is 'nope'; accepted: mixtral-8x7b"),
    "skew": (["--skew", "nope"], "skew is 'nope'; accepted: balanced"),
    "dtype": (["--dtype", "float8"], "dtype is 'float8'; accepted: bfloat16, float16, float32"),
    "precision": (["--precision", "fast"], "precision is 'fast'"),
    "text": (["--text", "none.txt"], "none.txt is not a file"),
    "trace": (["--trace", "none.npz"], "none.npz is not a file"),
    "x": (["--x", "none.npy"], "none.npy is not a file"),
    "implementation": (["--impl", "nope"], "no implementation is called 'nope'; accepted: oracle"),
    "target": (["--impl", "nope:fn"], "nope:fn does not import"),
    "folder": (["--out", "none/r.json"], "no folder none"),
    "two sources": (["--skew", "zipf", "--trace", "t.npz"], "--trace and --skew were given together"),
    "seed": ([*SMALL, "--seed", "-1"], "seed is -1"),
    "ranks": (["--ep", "0"], "--ep is 0"),
    "more ranks than devices": (["--ep", "999"], "--ep is 999"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_that_names_the_value(arguments, message, tmp_path):
    assert message in one_line(run("compare", *arguments))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "nope", "--json", "none/r.json"),
        ("check", "nope", "--junit", "none/r.xml"),
        ("mutants", "--only", "nope", "--json", "none/r.json"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(arguments):
    assert "no folder none" in one_line(run(*arguments))


def test_report_check_looks_at_readmes_only():
    assert "--check was given without --readme" in one_line(run("report", "r.json", "--check"))


def test_a_layer_is_found_from_the_current_folder(monkeypatch):
    Path("a_layer_here.py").write_text("def experts(problem, params, x, routing):\n    return x\n")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", os.getcwd())])
    assert options.implementations(["a_layer_here:experts"])[0].name == "a_layer_here:experts"


def test_a_gradient_that_does_not_come_back_is_a_finding():
    problem = Problem(T=4, K=1, E=2, D=8, F=8)
    case = make_case(problem)
    whole = registry.get("loop_and_pad")
    lacks = dataclasses.replace(
        whole, stages={**whole.stages, "experts_vjp": lambda problem, params, x, routing, dy: {"x": dy * 0}}
    )
    call = stages.stage_call(lacks, "experts forward+backward", [case])
    found = stages.stage_findings("experts forward+backward", call, case, 0, call(0), "oracle")
    lacking = {f.tensor for f in found if "no gradient" in f.message}
    assert lacking == {"topk_weights", "wi", "wo"} and not any(f.ok for f in found if f.tensor in lacking)


def test_a_trace_with_ids_out_of_range_is_named(tmp_path):
    np.savez("t.npz", topk_idx=np.array([[0, 99]], np.int32), topk_weights=np.ones((1, 2), np.float32))
    line = one_line(run("compare", "--preset", "mixtral-8x7b", "--trace", "t.npz"))
    assert "t.npz: token 0, slot 1 names expert 99; accepted: -1 to 7" in line


def test_usage_errors_name_the_value():
    from typer.testing import CliRunner as Runner

    result = Runner().invoke(app, ["compare", "--tokens", "many"], standalone_mode=False)
    assert usage_line(result.exception, ["compare", "--tokens", "many"]).startswith("--tokens is 'many': ")
    assert usage_line(result.exception, ["compare", "--tokens=many"]).startswith("--tokens is 'many': ")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_tables_fit_narrow_terminals(columns):
    for command in ("list", "doctor", "bars"):
        result = run(command, columns=columns)
        assert result.exit_code == 0, result.output
        assert max(map(len, result.stdout.splitlines())) <= columns


def test_list_and_doctor_as_json():
    rows = {r["name"]: r for r in json.loads(run("list", "--json").stdout)}
    assert rows["loop_and_pad"]["here"]
    assert not rows["te"]["here"] and rows["te"]["reason"]
    assert rows["blocked"]["recipes"]["mxfp8"]["here"] and not rows["ragged_dot"]["recipes"]["mxfp8"]["here"]
    assert rows["te"]["recipes"]["mxfp8"]["reason"] == rows["te"]["reason"]
    assert rows["te"]["recipes"]["fp8-current"]["host_sync"] and not rows["te"]["recipes"]["mxfp8"]["host_sync"]
    found = json.loads(run("doctor", "--json").stdout)
    assert found["environment"]["versions"]["jax"]


def test_an_unreadable_or_tampered_record_is_refused():
    assert (
        run("compare", *SMALL, "--impl", "loop_and_pad", "--no-timing", "--no-grad", "--out", "r.json").exit_code == 0
    )
    text = Path("r.json").read_text()
    for name, content in (("cut.json", text[:200]), ("edited.json", text.replace('"agree"', '"known"'))):
        Path(name).write_text(content)
        for command in ("guard", "report"):
            assert name in one_line(run(command, name))
    assert "no timings" in one_line(run("guard", "r.json"))
    assert "cannot be read" in one_line(run("report", "none.json"))


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_an_interrupt_is_clean(tmp_path):
    # A test runner in the background may have SIGINT ignored, which a child inherits and Python then leaves alone.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command = [sys.executable, "-c", heed + "from dropless.parity.cli import main; main()", "compare"]
    command += ["--tokens", "2048", "--out", "r.json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stderr is not None
    assert process.stderr.readline().strip()  # the first line of progress: work has begun
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())
