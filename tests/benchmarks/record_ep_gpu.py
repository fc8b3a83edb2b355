"""Records expert parallelism on several GPUs: the laws, dispatch and combine alone, and whole layers, beside TE's block.

    python tests/benchmarks/record_ep_gpu.py [--out FOLDER] [--only laws-te_ep,4096-8,...] [--skews zipf,balanced]
                                             [--prepare SECONDS] [--limit SECONDS] [--tiny]

NCCL EP has one group of one size a process, so each part is a process of its own. They run in two waves, first te_ep and
te_block, then xla_ep. The parts of a wave start at once: they draw their inputs, compile, judge, and check the laws side
by side, for --prepare seconds at most. Then, one part after the other and with nothing else running, each times its calls,
for --limit seconds at most. Each writes its record after every step, and a law that ends its process is recorded as such
before the rest go on in another. Leave NVLink multicast off
(NCCL_NVLS_ENABLE=0). NCCL_EP_JIT_CACHE_DIR and JAX_COMPILATION_CACHE_DIR make a second run start sooner. --tiny runs the
same steps at small sizes on whatever devices are here, virtual ones too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
WAVES = (
    ("laws-te_ep", "laws-te_block", "7168-256", "2048-128", "7168-32", "4096-8"),
    ("laws-xla_ep", "xla_ep-7168-256", "xla_ep-2048-128", "xla_ep-7168-32", "xla_ep-4096-8"),
)
"""Laws of one implementation each, then shapes by D and E."""
PARTS = tuple(part for wave in WAVES for part in wave)
STARTS = 4
"""Processes that one implementation's laws may end before the rest are given up."""
READY = "[ready]"
GO = "go\n"


def main() -> None:
    """Starts the parts of each wave, waits for laws and preparations, then lets the shapes time their calls in turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--prepare", type=float, default=170.0)
    parser.add_argument("--limit", type=float, default=30.0)
    parser.add_argument("--skews", default="zipf,balanced", help="loads of the whole layers")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--part", default=None, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part is not None:
        import ep_parts

        ep_parts.run(chosen.part, chosen)
        return
    chosen.out = chosen.out or Path(__file__).parent / "recorded" / "ep"
    chosen.out.mkdir(parents=True, exist_ok=True)
    parts = chosen.only.split(",")
    for part in parts:
        if part not in PARTS:
            sys.exit(f"--only has {part!r}; accepted: {', '.join(PARTS)}")
        (chosen.out / f"{part}.json").unlink(missing_ok=True)
    for wave in WAVES:
        end = time.monotonic() + chosen.prepare
        running = [Part(part, chosen) for part in wave if part in parts]
        for part in running:
            part.prepared(end)
        for part in running:
            part.finish(chosen.limit)


class Part:
    """One part's process, restarted when a law ends it."""

    def __init__(self, name: str, chosen: argparse.Namespace):
        self.name = name
        self.command = [sys.executable, __file__, "--part", name, "--out", str(chosen.out)]
        self.command += ["--skews", chosen.skews, *(["--tiny"] if chosen.tiny else [])]
        self.began = time.monotonic()
        self.starts = 0
        self.start()

    def start(self) -> None:
        """Starts the process and passes on what it prints."""
        self.starts += 1
        self.ready = threading.Event()
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.reader = threading.Thread(target=self.read, args=(self.process,), daemon=True)
        self.reader.start()

    def read(self, process: subprocess.Popen) -> None:
        """Until the process ends."""
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == READY:
                self.ready.set()
            else:
                print(f"{self.name}: {line}", end="", flush=True)
        process.wait()
        self.ready.set()

    def prepared(self, end: float) -> None:
        """Waits until the part has nothing left but to time; one that is late is ended."""
        while True:
            if not self.ready.wait(max(end - time.monotonic(), 0.1)):
                self.process.kill()
                print(f"{self.name}: was not ready in time; what it had written is kept", flush=True)
                return
            code = self.process.poll()
            laws = self.name.startswith("laws")
            if laws and code and self.starts < STARTS and time.monotonic() < end:
                by = signal.Signals(-code).name if code < 0 else f"itself with status {code}"
                print(f"{self.name}: ended by {by}; the laws that are left go on", flush=True)
                self.start()
                continue
            print(f"{self.name}: ready after {time.monotonic() - self.began:.0f} s", flush=True)
            return

    def finish(self, limit: float) -> None:
        """Lets the part time its calls, and ends it after `limit` seconds."""
        began = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # it has ended
            assert self.process.stdin is not None
            self.process.stdin.write(GO)
            self.process.stdin.flush()
        try:
            code = self.process.wait(timeout=limit)
            became = "done" if code == 0 else f"ended with status {code}"
        except subprocess.TimeoutExpired:
            self.process.kill()
            became = f"ended after {limit:g} s; what it had written is kept"
        self.reader.join(5.0)
        print(f"{self.name}: {became}, {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    main()
