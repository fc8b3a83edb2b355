"""Bring your own layer: layers outside the repository are judged from the command line's own functions, right and wrong."""

import importlib.metadata
import json
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from dropless.parity.check import Report, check, describe, junit, reproduce
from dropless.parity.compare import Finding
from dropless.parity.interface import Unsupported
from dropless.parity.job import Job, NotCallable, load
from dropless.parity.known import Known, apply_known, read_known
from dropless.parity.law import law
from dropless.parity.problem import InvalidInput, Problem
from dropless.parity.profiles import FEW, plain_problems
from dropless.parity.registry import get
from dropless.parity.suite import Settings, run_law
from dropless.parity.verdict import Verdict

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A folder outside the repository with a user's modules, as the current one."""
    for source in FIXTURES.glob("their_*.py"):
        shutil.copy(source, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def judge(attribute: str, *laws: str, apart: bool = False, **options) -> Report:
    """A short check of one of the user's layers by some laws: `apart` in a worker process, else in this one."""
    target = f"their_layers:{attribute}"
    return check(target if apart else get(target), only=laws, **{"max_examples": 3, "shrink": False, **options})


def status(report: Report, law: str) -> str:
    """One law's verdict."""
    return next(v.status for v in report.verdicts if v.law == law)


def test_a_right_layer_agrees(theirs):
    report = judge(
        "right", "exact-experts", "value", "gradient-wi", "idle-gradients", "inert-tokens", dtypes=["float32"]
    )
    assert [v.status for v in report.verdicts] == ["agree"] * 5
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("attribute", "law", "options"),
    [
        ("mispaired", "exact-experts", {}),
        ("stale_idle_gradient", "idle-gradients", {}),
        ("leaks_undefined_rows", "inert-tokens", {}),
        ("drops_the_last_of_4096", "exact-experts", {}),
        ("unweighted_bias", "value", {"wider": ["bias"]}),
        ("renormalises", "normalisation", {}),
        ("opaque_wrong", "unreported-routes", {}),
    ],
)
def test_a_wrong_layer_fails_its_law_and_the_printed_line_shows_it_again(theirs, attribute, law, options):
    if attribute not in ("renormalises", "opaque_wrong"):
        options = {**options, "dtypes": ["float32"]}
    report = judge(attribute, law, **options)
    (verdict,) = report.verdicts
    assert verdict.status == "disagree" and report.exit_code == 1
    assert verdict.finding is not None and verdict.finding.check in ("values", "finite")
    line = shlex.split(reproduce(report.job, verdict))
    assert line[:4] == ["dropless", "check", f"their_layers:{attribute}", "--only"]
    again = judge(attribute, line[4], case=line[6], wider=options.get("wider", ()))
    assert again.verdicts[0].status == "disagree"
    assert repr(again.verdicts[0].finding) == repr(verdict.finding)  # repr, since NaN is not equal to itself


def test_the_command_line_judges_a_layer_apart_and_its_line_reproduces_the_failure(theirs):
    dropless = [sys.executable, "-m", "dropless.parity"]
    first = ["check", "their_layers:mispaired", "--only", "exact-experts", "--dtypes", "float32", "--max-examples", "2"]
    ran = subprocess.run([*dropless, *first, "--json", "record.json"], capture_output=True, text=True)
    assert ran.returncode == 1, ran.stderr
    assert json.loads((theirs / "record.json").read_text())["cases"][0]["results"][0]["verdict"] == "disagree"
    line = next(text.split("again", 1)[1] for text in ran.stdout.splitlines() if text.strip().startswith("again"))
    again = subprocess.run([*dropless, *shlex.split(line)[1:]], capture_output=True, text=True)
    assert again.returncode == 1, again.stderr
    told = [text for text in ran.stdout.splitlines() if text.strip().startswith(("says", "worst", "routing"))]
    assert told and all(text in again.stdout for text in told)


def test_a_failure_shrinks_to_the_tokens_that_matter(theirs):
    report = judge("mispaired", "exact-experts", dtypes=["float32"], shrink=True)
    text = "\n".join(describe(report.job, report.verdicts[0]))
    wrong = [row for row in _routing(report.verdicts[0]) if row[0] > row[1] >= 0]
    assert len(wrong) == 1 and max(wrong[0]) <= 2, text  # one token out of order shows a mixed-up pair
    assert all(row == [0, 1] for row in _routing(report.verdicts[0]) if row not in wrong), text


def test_a_right_layer_that_reports_no_routes_agrees(theirs):
    report = judge("opaque", "unreported-routes", "layer-value")
    assert status(report, "unreported-routes") == "agree"
    assert status(report, "layer-value") == "cannot run"


def test_what_a_function_does_not_handle_is_left_out_and_said(theirs):
    report = judge("declines", "value")
    assert status(report, "value") == "agree"
    assert any("bfloat16" in note and "float32 only" in note for note in report.notes)


@pytest.mark.parametrize(
    ("attribute", "check_name", "words"),
    [
        ("wrong_shape", "shape", "accepted: [24, 33]"),
        ("wrong_dtype", "dtype", "accepted: float32"),
        ("returns_none", "ran", "NoneType"),
        ("raises", "ran", "no kernel for this shape"),
        ("returns_text", "ran", "not a valid JAX type"),
    ],
)
def test_a_broken_target_gets_a_verdict_for_each_law_and_the_suite_goes_on(theirs, attribute, check_name, words):
    report = judge(attribute, "exact-experts", "value", dtypes=["float32"])
    assert [v.status for v in report.verdicts] == ["disagree", "disagree"]
    assert report.exit_code == 1
    for verdict in report.verdicts:
        assert verdict.finding is not None and verdict.finding.check == check_name
        assert words in verdict.finding.message


def test_a_backward_that_raises_is_the_targets_own_fault(theirs):
    report = judge("raises_backward", "gradient-x", "checkpoint", dtypes=["float32"])
    assert [v.status for v in report.verdicts] == ["disagree", "disagree"]
    for verdict in report.verdicts:
        assert verdict.finding is not None and "no backward for this shape" in verdict.finding.message
        assert "their_layers.py:" in verdict.finding.message  # its own line, not one of this suite


def test_a_target_that_kills_its_process_gets_a_verdict_and_a_new_process(theirs):
    report = judge("dies", "exact-experts", "value", apart=True)
    assert [v.status for v in report.verdicts] == ["disagree", "disagree"]
    assert all(v.finding is not None and "SIGABRT" in v.finding.message for v in report.verdicts)


def test_a_hang_ends_at_the_time_out_and_is_not_paid_for_by_every_law(theirs):
    report = judge("hangs", "exact-experts", "value", "gradient-x", apart=True, timeout_s=1.0)
    assert [v.status for v in report.verdicts] == ["disagree", "disagree", "cannot run"]
    assert report.verdicts[0].finding is not None and "hung" in report.verdicts[0].finding.message
    assert report.exit_code == 1


def test_a_numpy_layer_is_judged_without_gradients_and_says_so(theirs):
    report = judge("numpy_right", "value", "gradient-x", arrays="numpy")
    assert status(report, "value") == "agree"
    assert "without experts_vjp" in next(v.reason for v in report.verdicts if v.law == "gradient-x")


def test_a_layer_that_writes_into_its_input_is_found_out(theirs):
    report = judge("numpy_mutates", "inputs-untouched", arrays="numpy")
    assert report.verdicts[0].status == "disagree"
    assert report.verdicts[0].finding is not None and report.verdicts[0].finding.tensor == "x"


def test_a_backward_that_writes_into_its_input_is_found_out(theirs):
    report = judge("numpy_mutates_backward", "inputs-untouched", arrays="numpy")
    assert report.verdicts[0].status == "disagree"
    assert report.verdicts[0].finding is not None and report.verdicts[0].finding.tensor == "gradient of y"


def test_supports_and_available_may_be_plain_bools(theirs):
    says = get("their_layers:says_bool")
    wide = plain_problems(["bfloat16"], ())[0]
    assert says.can_run(wide.replace(dtype="float32"))
    assert "says no" in says.can_run(wide).reason
    with pytest.raises(Unsupported, match="available says no"):
        judge("says_nowhere", "value")


def test_a_misspelt_trait_is_named_with_those_there_are(theirs):
    with pytest.raises(InvalidInput, match=r"claims \['determinstic'\]; accepted: deterministic"):
        judge("misspelt", "value")
    with pytest.raises(InvalidInput, match="claims"):
        load(Job("their_layers:misspelt"))


def test_an_entry_point_that_does_not_load_is_named(monkeypatch):
    point = EntryPoint("theirs", "json:nothing_here", "dropless.implementations")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [point])
    with pytest.raises(InvalidInput, match=r"theirs \(json:nothing_here\) does not import: AttributeError"):
        get("theirs")


def test_no_more_routings_are_drawn_than_asked_for():
    problem = plain_problems(["float32"], ())[0]
    ran: list[Problem] = []

    @law("counts", stage="experts", judged_by="bits", faults="A")
    def counts(implementation, case):
        """Counts its cases."""
        ran.append(case.problem)
        return [Finding(tensor="y", check="values", ok=True)]

    run_law(counts, get("loop_and_pad"), [problem], Settings(max_examples=1, covering=(problem,)))
    assert len(ran) == FEW + 1


def test_torch_layers_are_judged_with_their_autograd(theirs):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    laws = ("exact-experts", "value", "gradient-wo", "idle-gradients")
    assert check("their_torch_layers:right", only=laws, arrays="torch", max_examples=3).exit_code == 0
    wrong = check("their_torch_layers:mispaired", only=laws, arrays="torch", max_examples=3)
    assert wrong.verdicts[0].status == "disagree"


def test_targets_that_do_not_import_or_cannot_be_called(theirs):
    with pytest.raises(InvalidInput, match="does not import"):
        check("their_missing:right")
    with pytest.raises(NotCallable, match="is a int"):
        check("their_layers:not_callable")
    with pytest.raises(NotCallable, match="is the class Opaque; accepted: an instance"):
        check("their_layers:Opaque")


def test_options_are_refused_in_one_line():
    with pytest.raises(InvalidInput, match="no law is called"):
        check("loop_and_pad", only=["valeu"])
    with pytest.raises(InvalidInput, match="profile is"):
        check("loop_and_pad", profile="fast")
    with pytest.raises(InvalidInput, match="one law"):
        check("loop_and_pad", case="{}")


def test_options_that_judge_nothing_are_refused():
    with pytest.raises(InvalidInput, match="--dtypes is 'float64'; accepted: bfloat16"):
        load(Job("blocked", dtypes=("float64",)))
    with pytest.raises(InvalidInput, match="--dtypes is 'float16'; accepted with profile gpu: bfloat16"):
        load(Job("blocked", "gpu", dtypes=("float16",)))
    with pytest.raises(InvalidInput, match="--with is 'bias' but blocked is no bare function"):
        load(Job("blocked", wider=("bias",)))


def test_known_failures_alarms_and_ranges(tmp_path):
    failed, passed = Verdict("value", "experts", "disagree"), Verdict("value", "experts", "agree")

    def entry(versions: dict[str, str]) -> Known:
        return Known(implementation="theirs", law="value", versions=versions, reason="upstream")

    assert apply_known([failed], [entry({"numpy": ">=1.0"})], "theirs")[0].status == "known"
    assert apply_known([passed], [entry({"numpy": ">=1.0"})], "theirs")[0].status == "alarm"
    assert apply_known([failed], [entry({"numpy": "<1.0"})], "theirs")[0].status == "alarm"
    assert apply_known([failed], [entry({})], "others")[0].status == "disagree"
    for entries in ([entry({"numpy": "<1.0"}), entry({"numpy": ">=1.0"})], [entry({}), entry({"numpy": "<1.0"})]):
        assert apply_known([failed], entries, "theirs")[0].status == "known"
    file = tmp_path / "known.json"
    file.write_text(
        json.dumps({"known": [{"implementation": "a", "law": "value", "reason": "r", "versions": {"jax": "~1"}}]})
    )
    with pytest.raises(InvalidInput, match="version range"):
        read_known(file)
    file.write_text(json.dumps({"known": [{"implementation": "a", "law": "valeu", "reason": "r"}]}))
    with pytest.raises(InvalidInput, match=r"known.json: no law is called 'valeu'"):
        read_known(file)


def test_junit_counts_failures_and_skips():
    verdicts = (Verdict("value", "experts", "agree"), Verdict("ties", "route", "cannot run", "why"))
    text = junit(Report(Job("a:b"), "a:b", (*verdicts, Verdict("scan", "experts", "alarm", "gone"))))
    assert 'tests="3" failures="1" skipped="1"' in text


def test_the_pytest_plugin_adds_one_test_a_law_and_nothing_unasked(theirs):
    (theirs / "test_own.py").write_text("def test_own():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", *_plugin()]
    own = subprocess.run(command, capture_output=True, text=True, cwd=theirs)
    assert "1 passed" in own.stdout and own.returncode == 0, own.stdout
    asked = [*command, "--dropless-target", "their_layers:mispaired", "--dropless-dtypes", "float32"]
    ran = subprocess.run([*asked, "-k", "exact-experts or own"], capture_output=True, text=True, cwd=theirs)
    assert "1 failed, 1 passed" in ran.stdout and "--only exact-experts --case" in ran.stdout, ran.stdout
    for refused, words in (("their_layers:missing", []), ("their_layers:right", ["--dropless-known", "none.json"])):
        ran = subprocess.run(
            [*command, "--dropless-target", refused, *words, "-k", "value or ties"],
            capture_output=True,
            text=True,
            cwd=theirs,
        )
        assert ran.stdout.count("dropless: ") >= 2 and "Traceback" not in ran.stdout + ran.stderr, ran.stdout
        assert "TypeError" not in ran.stdout and ".py:" not in ran.stdout, ran.stdout
    assert sorted(p.name for p in theirs.iterdir() if p.name != "__pycache__") == [
        "test_own.py",
        "their_layers.py",
        "their_torch_layers.py",
    ]


def _plugin() -> list[str]:
    from importlib.metadata import entry_points

    registered = any(point.value == "dropless.parity.plugin" for point in entry_points(group="pytest11"))
    return [] if registered else ["-p", "dropless.parity.plugin"]


def _routing(verdict: Verdict) -> list[list[int]]:
    from dropless.parity.spec import parse_case

    return [list(row) for row in parse_case(verdict.case).topk_idx or ()]
