"""Writes every table of the README files anew from the records that they name.

    python tests/benchmarks/readme_tables.py [--check]

That is `dropless report --readme` for each of them, and two tables of what only records of several GPUs hold: kernels and laws, between
`<!-- kernels: RECORD... -->`, or `<!-- ep laws: RECORD... -->`, and `<!-- end of table -->`. With --check it changes nothing and
exits 1 when a table is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from dropless.parity.records import read, write_text
from dropless.parity.report_readme import refresh

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
PART = re.compile(r"(<!-- (kernels|ep laws): ([^>]*) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main() -> int:
    """Writes the tables, or says which file is out of date."""
    check, fresh = "--check" in sys.argv, True
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
        fresh = fresh and same
    return 1 if check and not fresh else 0


def renewed(text: str) -> str:
    """The text with its tables made anew from the records that they name."""
    views = {"kernels": kernels, "ep laws": laws}
    return PART.sub(lambda m: m[1] + views[m[2]]([ROOT / name for name in m[3].split()]) + m[4], text)


def kernels(paths: list[Path]) -> str:
    """Microseconds of one call by kernel, on the GPU that waits least in combine."""
    columns = ["layer", "implementation", "call", *GROUPS, "other", "queued call", "TFLOP/s a GPU"]
    return table([columns, *(row for path in paths for row in rows(path))])


def laws(paths: list[Path]) -> str:
    """Of each record how many laws agree, beside which NCCL, and every other law with its verdict."""
    lines = [["implementation", "laws that agree", "worst error, % of bar", "others", "NCCL", "XLA_FLAGS"]]
    for path in paths:
        record = read(path)
        found = record.extra["laws"]
        agree = [law for law in found if law["status"] == "agree"]
        worst = max((law["percent"] or 0.0 for law in agree), default=0.0)
        others = ", ".join(f"`{law['law']}`: {law['status']}" for law in found if law["status"] != "agree")
        under_way = record.extra.get("under way", "")
        environment = record.environment
        lines.append(
            [
                f"`{found[0]['implementation']}`",
                str(len(agree)),
                f"{worst:.0f} %" if worst else "exact",
                others or under_way or "none",
                environment["versions"]["nccl"],
                f"`{flags}`" if (flags := environment["flags"].get("XLA_FLAGS")) else "none",
            ]
        )
    return table(lines)


def table(lines: list[list[str]]) -> str:
    """Markdown; the first line is the head."""
    rule = ["---"] * len(lines[0])
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], rule, *lines[1:]))


def rows(path: Path) -> Iterator[list[str]]:
    """A row for each implementation and call under a balanced load."""
    for case in read(path).cases:
        if case.label != LOAD:
            continue
        p = case.problem
        layer = f"{p['D']} x {p['F']}, {p['E']} experts, top-{p['K']}"
        for result in case.results:
            for timing in result.timings:
                gpus = [grouped(kernels) for kernels in result.notes[timing.what]["kernels_us"]]
                least = min(gpus, key=lambda g: g["combine kernel"])
                median = float(np.median(timing.device_s))
                yield [
                    layer,
                    f"`{result.implementation}`",
                    timing.what.removeprefix("layer "),
                    *(f"{us:.0f}" for us in least.values()),
                    f"{1e3 * median:.2f} ms",
                    f"{timing.useful_flops / median / 1e12:.0f}",
                ]


def grouped(kernels: dict[str, float]) -> dict[str, float]:
    """Microseconds by column."""
    found = dict.fromkeys((*GROUPS, "other"), 0.0)
    for name, us in kernels.items():
        column = next((c for c, parts in GROUPS.items() if any(part in name for part in parts)), "other")
        found[column] += us
    return found


if __name__ == "__main__":
    sys.exit(main())
