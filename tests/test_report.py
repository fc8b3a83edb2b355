"""Reports: everything in a record is shown, nothing is fetched, and generated tables are what the records say."""

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dropless.parity import InvalidInput, Problem, cli_guard, cli_ladder, guard, ladder, records, report, report_readme
from dropless.parity.records import FindingRecord, ResultRecord, TimingRecord
from dropless.parity.report_sections import ratio, sections
from dropless.parity.stages import WHATS

BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)


@pytest.fixture(scope="module")
def record() -> records.Record:
    """A record with every kind of thing in it: times, failures, declines, bounds, histograms."""
    made = records.new_record("bench", seed=1)
    made.environment |= {"platform": "cpu", "device_kind": "A CPU", "cores": 2, "versions": {"jax": "0.10.2"}}
    for label, sizes in (("even <loads>", [4, 4, 4, 4]), ("one | hot", [13, 1, 1, 1])):
        case = records.new_case(label, Problem(T=8, K=2, E=4, D=16, F=32))
        case.rows, case.group_sizes = 16, sizes
        for i, name in enumerate(("loop_and_pad", "blocked")):
            finding = FindingRecord(
                tensor="y", stage="experts", ok=True, percent=40.0 + i, histogram=[100, 40, 5, 1] + [0] * 24
            )
            timings = [
                TimingRecord(
                    what=w,
                    compile_s=0.5,
                    wall_s=[0.010 / (1 + 3 * i), 0.011 / (1 + 3 * i), 0.012 / (1 + 3 * i)],
                    useful_flops=1e6,
                    bytes_moved=1e5,
                    temp_bytes=1024,
                )
                for w in WHATS
            ]
            case.results.append(ResultRecord(implementation=name, verdict="agree", findings=[finding], timings=timings))
        bad = FindingRecord(tensor="y", stage="experts", ok=False, percent=900.0, message="y[3] <off>")
        case.results.append(
            ResultRecord(implementation="mine", verdict="disagree", reason="y[3] <off>", findings=[bad])
        )
        case.results.append(
            ResultRecord(implementation="te", verdict="cannot run", reason="compute capability None, needs 9.0")
        )
        for what, flops, moved in (
            ("dense GEMM", 1e9, 0),
            ("memory copy", 0, 1e8),
            ("grouped GEMMs alone: blocked", 1e6, 0),
        ):
            case.bounds.append(
                TimingRecord(what=what, compile_s=0.1, wall_s=[0.001], useful_flops=flops, bytes_moved=moved)
            )
        made.cases.append(case)
    return made


def test_a_case_without_the_baseline_has_times_but_no_speedup(record):
    alone = dataclasses.replace(record.cases[0], label="alone")
    alone.results = [r for r in alone.results if r.implementation != "loop_and_pad"]
    both = dataclasses.replace(record, cases=[*record.cases, alone])
    found = {section.title: section for section in sections([both])}
    assert "Times: alone" in found
    over = next(s for title, s in found.items() if title.startswith("Speedup"))
    assert [row[0] for row in over.rows] == [case.label for case in record.cases]
    only = dataclasses.replace(record, cases=[alone])
    assert not any(s.title.startswith("Speedup") for s in sections([only]))


@pytest.fixture(scope="module")
def page(record) -> str:
    """Drawn once: the plots take seconds."""
    return report.page(sections([record]))


def test_markdown_shows_every_implementation_reason_and_failure(record):
    text = report.markdown(sections([record]))
    assert "FAILS (900 %)" in text
    assert "te: cannot run: compute capability None, needs 9.0" in text
    assert "4.00" in text  # blocked's speedup
    assert "one \\| hot" in text
    widths = {}
    for line in text.splitlines():
        if line.startswith("|"):
            widths.setdefault(line.replace("\\|", "").count("|"), line)
    assert len(widths) > 2


def test_tables_have_as_many_cells_as_headers(record):
    for s in sections([record]):
        assert {len(row) for row in s.rows} <= {len(s.headers)}, s.title


def test_html_is_one_file_that_asks_for_nothing(page):
    assert "even &lt;loads&gt;" in page and "even <loads>" not in page
    assert "y[3] &lt;off&gt;" in page
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page.replace("xlink:", ""))
    assert "<script" not in page
    assert page.count("<svg") == page.count("</svg>") >= 6
    ids = re.findall(r' id="([^"]+)"', page)
    sections_only = [i for i in ids if re.fullmatch(r"s\d+", i)]
    assert len(sections_only) == len(set(sections_only))


def test_every_plot_names_its_unit_and_has_its_table(page):
    figures = re.findall(r"<figure.*?</figure>(.*?)</section>", page, re.S)
    plots = re.findall(r"<figure.*?</figure>", page, re.S)
    assert len(plots) == len(figures) >= 6
    for plot, below in zip(plots, figures, strict=True):
        assert re.search(r"\((x|ms|1)\)|FLOP", re.sub(r"<[^>]+>", " ", plot))
        assert below.count("<tr>") >= 2


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_renders_it_without_a_word_on_the_console(page, tmp_path, width):
    file = tmp_path / "report.html"
    # The page reports on itself: what is wider than the window would make it scroll sideways.
    probe = "<script>document.title = 'width ' + document.documentElement.scrollWidth + ' of ' + innerWidth;</script></body>"
    file.write_text(page.replace("</body>", probe))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={width},900"]
    command = [BROWSER, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r"<title>width (\d+) of (\d+)</title>", done.stdout)
    assert found and int(found[1]) <= int(found[2]), found


def test_readme_parts_are_filled_checked_and_stable(record, tmp_path):
    (tmp_path / "pyproject.toml").write_text("")
    records.write(tmp_path / "r.json", record_without_failures(record))
    readme = tmp_path / "README.md"
    readme.write_text(
        "before\n<!-- generated: speedup r.json -->\nold\n<!-- end -->\nbetween\n"
        "<!-- generated: picture speed.svg r.json -->\n<!-- end -->\n<!-- generated: headline r.json -->\n<!-- end -->\nafter\n"
    )
    assert not report_readme.refresh(readme, check=True)
    assert "old" in readme.read_text()
    assert not report_readme.refresh(readme)
    first = readme.read_text()
    assert "old" not in first and "4.00" in first and first.startswith("before\n") and first.endswith("after\n")
    assert (tmp_path / "speed.svg").read_text().startswith("<svg")
    assert report_readme.refresh(readme, check=True)
    assert readme.read_text() == first
    (tmp_path / "speed.svg").write_text("edited")
    assert not report_readme.refresh(readme, check=True)
    readme.write_text("<!-- generated: nonsense r.json -->\n<!-- end -->\n")
    with pytest.raises(InvalidInput, match="view 'nonsense'; accepted: headline"):
        report_readme.refresh(readme)


def record_without_failures(record: records.Record) -> records.Record:
    made = records.loads(records.dumps(record))
    for case in made.cases:
        case.results = [r for r in case.results if r.verdict == "agree"]
    return made


def test_the_projects_own_files_are_up_to_date():
    root = Path(__file__).resolve().parent.parent
    script = root / "tests" / "benchmarks" / "readme_tables.py"
    fresh = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert fresh.returncode == 0, fresh.stdout + fresh.stderr
    spec = importlib.util.spec_from_file_location("readme_tables", script)
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = (root / "optimized" / "README.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith("| 4096 x 3584") and "`te_ep` | forward |" in line]
    assert tables.renewed(text) == text == tables.renewed(text.replace(row + "\n", ""))


def test_ladder_rungs_point_at_code_and_say_two_sentences():
    root = Path(ladder.__file__).resolve().parent.parent
    for rung in ladder.RUNGS:
        assert len(re.findall(r"[.:](?:\s|$)", rung.changed)) >= 2, rung.name
        path, _, line = rung.code_at().rpartition(":")
        assert (root / path).is_file() and int(line) > 0


def test_ladder_record_renders_with_its_waterfall(record):
    made = records.loads(records.dumps(record_without_failures(record)))
    made.kind = "ladder"
    made.extra["rungs"] = ladder.rows(made, made.cases[0])
    rungs = {r["implementation"]: r for r in made.extra["rungs"]}
    assert rungs["blocked"]["seconds"] and not rungs["loop_host"].get("seconds")
    found = [s for s in sections([made]) if s.title.startswith("Ladder")]
    assert len(found) == 1 and len(found[0].rows) == len(ladder.RUNGS)
    assert "<svg" in found[0].plot()
    text = "\n".join(report_readme.VIEWS["ladder"]([made]))
    assert "block alignment" in text and "MFLOP/s" in text
    spread = made.cases[0].results[-1]
    spread.notes["devices"] = 2
    assert ladder.rows(made, made.cases[0])[4]["devices"] == 2
    assert ratio(made.cases[0], spread.implementation, WHATS[5]) is None
    assert cli_ladder.ranks_for(6, 8) in (1, 2)


def test_the_tables_of_laws_tell_judged_from_not_judged():
    made = records.new_record("check")
    case = records.new_case("laws", Problem(T=8, K=2, E=4, D=16, F=32, dtype="bfloat16", recipe="mxfp8"))
    findings = [
        FindingRecord(tensor="", stage="route", ok=True, law="ties", verdict="agree"),
        FindingRecord(tensor="y", stage="experts", ok=True, percent=20.0, law="value", verdict="agree"),
        FindingRecord(tensor="", stage="layer", ok=True, law="masked", verdict="cannot run", message="one | reason"),
        FindingRecord(tensor="", stage="permute", ok=True, law="bijection", verdict="known", message="upstream"),
    ]
    case.results.append(ResultRecord(implementation="te", verdict="agree", findings=findings))
    case.results.append(ResultRecord(implementation="te_ep", verdict="cannot run", reason="1 GPU"))
    made.cases.append(case)
    text = "\n".join(report_readme.VIEWS["laws"]([made]))
    assert "| `te` | 2 | 20 % |" in text and "| `te_ep` | 0 | - |" in text
    assert "one \\| reason" in text and "| `te_ep` | all | cannot run | 1 GPU |" in text and "upstream" in text
    matrix = "\n".join(report_readme.VIEWS["gpu-matrix"]([made]))
    assert "`te` mxfp8" in matrix and "layer" not in matrix
    assert "| route | exact |" in matrix and "| permute | known |" in matrix and "| experts | 20 % |" in matrix


def test_importing_the_command_line_imports_no_plot_library():
    code = "import sys, dropless.parity.cli; sys.exit(bool({'matplotlib', 'hypothesis', 'pytest', 'transformer_engine'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_guard_summary_is_markdown(record):
    rows = guard.shifts(record.cases[0], record.cases[1])
    assert cli_guard.summary(rows, [], [], []).count("| blocked |") == len(WHATS)
