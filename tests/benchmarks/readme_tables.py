"""Writes every table of the README files anew from the records that they name.

    python tests/benchmarks/readme_tables.py [--check]

That is `dropless report --readme` for each of them, and tables of what only records of several GPUs hold, between
`<!-- VIEW: RECORD... -->` and `<!-- end of table -->`; VIEW is one of VIEWS. With --check it changes nothing and exits 1 when a table
is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dropless.parity.records import CaseRecord, ResultRecord, TimingRecord, read, write_text
from dropless.parity.report import table
from dropless.parity.report_readme import refresh
from dropless.parity.terminal import size

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "optimized/README.md", "tests/benchmarks/README.md")
LOAD = "balanced"
GROUPS = {
    "products": ("ptrGroup",),
    "dispatch kernel": ("dispatch_kernel",),
    "copies to experts": ("permute_dup",),
    "combine kernel": ("combine_kernel",),
    "sum of copies": ("permute_reduce",),
    "routing state": ("scan_flat", "nccl_ep::ht::"),
}
"""Column -> parts of its kernels' names; what belongs to none is `other`."""
PART = re.compile(r"(<!-- (ep [a-z]+): ([^>]*) -->\n).*?(<!-- end of table -->)", re.DOTALL)
LINK_GB_PER_S = 450
"""NVLink's, a direction."""
AIMS = {(4096, 3584): (500, 560), (7168, 2048): (570, 600), (2048, 768): (340, 420)}
"""D, F -> useful TFLOP/s a GPU that te_ep aims at under a balanced load: forward, forward + backward."""


def main() -> int:
    """Writes the tables, or says which file is out of date."""
    check, stale = "--check" in sys.argv, False
    for name in READMES:
        path = ROOT / name
        same = refresh(path, check=check)
        text = path.read_text(encoding="utf-8")
        if (new := renewed(text)) != text:
            same = False
            if not check:
                write_text(path, new)
        if not same:
            print(f"{name} {'is out of date: run python tests/benchmarks/readme_tables.py' if check else 'rewritten'}")
        stale |= not same
    return int(check and stale)


def renewed(text: str) -> str:
    """The text with its tables made anew from the records that they name."""

    def fill(found: re.Match[str]) -> str:
        lines = VIEWS[found[2]]([ROOT / name for name in found[3].split()])
        return found[1] + "\n".join(lines) + "\n" + found[4]

    return PART.sub(fill, text)


def layers(paths: list[Path]) -> list[str]:
    """Whole layers: rates beside the aims, the part of the kernels' time that moves tokens, and memory."""
    calls = ("layer forward", "layer forward+backward")
    headers = [
        "layer",
        "load",
        "implementation",
        "TFLOP/s a GPU",
        "aim",
        "communication",
        "temporaries",
        "process's peak",
    ]
    rows = []
    for case, result in results(paths):
        timings = [t for what in calls if (t := result.timing(what))]
        if len(timings) != len(calls):
            continue
        p = case.problem
        shares = [result.notes[what]["communication_share"] for what in calls]
        aim = AIMS[p["D"], p["F"]] if (result.implementation, case.label) == ("te_ep", LOAD) else ()
        rows.append(
            [
                shape(p),
                case.label,
                f"`{result.implementation}`",
                " / ".join(map(tflops, timings)),
                " / ".join(map(str, aim)) or "-",
                " / ".join(f"{100 * share:.0f} %" for share in shares),
                size(timings[-1].temp_bytes),
                size(result.notes["peak_bytes"]),
            ]
        )
    return table(headers, rows)


def exchange(paths: list[Path]) -> list[str]:
    """Dispatch and combine alone, uniform random experts: what crosses, how long it takes, and the bytes' rate."""
    headers = [
        "D, experts, top-k",
        "tokens a GPU",
        "implementation",
        "MB sent: once, raw",
        "dispatch",
        "GB/s: once, raw",
    ]
    headers += [f"once, of {LINK_GB_PER_S} GB/s", "dispatch and combine", "prepare"]
    rows = []
    for case, result in results(paths):
        if (dispatch := result.timing("dispatch")) is None:
            continue
        p, sent = case.problem, [max(case.traffic[name]) for name in ("sent", "sent_raw")]
        rates = [bytes_ / dispatch.median / 1e9 for bytes_ in sent]
        both, prepare = result.timing("dispatch and combine"), result.timing("prepare")
        rows.append(
            [
                f"{p['D']}, {p['E']}, {p['K']}",
                f"{p['T'] // case.traffic['ranks']:,}",
                f"`{result.implementation}`",
                ", ".join(f"{bytes_ / 1e6:.0f}" for bytes_ in sent),
                f"{1e6 * dispatch.median:,.0f} us",
                ", ".join(f"{rate:.3g}" for rate in rates),
                f"{100 * rates[0] / LINK_GB_PER_S:.2g} %",
                f"{1e6 * both.median:,.0f} us",
                f"{1e6 * prepare.median:,.0f} us" if prepare else "-",
            ]
        )
    return table(headers, rows)


def kernels(paths: list[Path]) -> list[str]:
    """Microseconds of one call by kernel under a balanced load, on the GPU that waits least in combine."""
    headers = ["layer", "implementation", "call", *GROUPS, "other", "queued call", "TFLOP/s a GPU"]
    rows = []
    for case, result in results(paths):
        for timing in result.timings if case.label == LOAD else ():
            gpus = [grouped(times) for times in result.notes[timing.what]["kernels_us"]]
            least = min(gpus, key=lambda gpu: gpu["combine kernel"])
            rows.append(
                [
                    shape(case.problem),
                    f"`{result.implementation}`",
                    timing.what.removeprefix("layer "),
                    *(f"{us:.0f}" for us in least.values()),
                    f"{1e3 * timing.median:.2f} ms",
                    tflops(timing),
                ]
            )
    return table(headers, rows)


def laws(paths: list[Path]) -> list[str]:
    """Of each record how many laws agree, beside which NCCL, and every other law with its verdict."""
    headers = ["implementation", "laws that agree", "worst error, % of bar", "others", "NCCL", "XLA_FLAGS"]
    rows = []
    for path in paths:
        record = read(path)
        found = record.extra["laws"]
        agree = [law for law in found if law["status"] == "agree"]
        worst = max((law["percent"] or 0.0 for law in agree), default=0.0)
        others = [f"`{law['law']}`: {law['status']}" for law in found if law["status"] != "agree"]
        if "under way" in record.extra:
            others.append(f"`{record.extra['under way']}`: did not end")
        environment = record.environment
        flags = environment["flags"].get("XLA_FLAGS")
        rows.append(
            [
                f"`{found[0]['implementation']}`",
                str(len(agree)),
                f"{worst:.0f} %" if worst else "exact",
                ", ".join(others) or "none",
                environment["versions"]["nccl"],
                f"`{flags}`" if flags else "none",
            ]
        )
    return table(headers, rows)


def results(paths: list[Path]) -> Iterator[tuple[CaseRecord, ResultRecord]]:
    """Every result of the records, with its case."""
    for path in paths:
        for case in read(path).cases:
            for result in case.results:
                yield case, result


def grouped(kernels: dict[str, float]) -> dict[str, float]:
    """Microseconds by column."""
    found = dict.fromkeys((*GROUPS, "other"), 0.0)
    for name, us in kernels.items():
        column = next((c for c, parts in GROUPS.items() if any(part in name for part in parts)), "other")
        found[column] += us
    return found


def shape(problem: dict[str, Any]) -> str:
    """A layer's sizes."""
    return f"{problem['D']} x {problem['F']}, {problem['E']} experts, top-{problem['K']}"


def tflops(timing: TimingRecord) -> str:
    """Useful TFLOP/s a GPU."""
    return f"{timing.flops_per_s / 1e12:.0f}"


VIEWS = {"ep layers": layers, "ep exchange": exchange, "ep kernels": kernels, "ep laws": laws}


if __name__ == "__main__":
    sys.exit(main())
