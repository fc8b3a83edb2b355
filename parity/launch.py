"""Starting ranks: virtual CPU devices, the GPUs of this host, or one process per GPU on any number of hosts.

A process that joins others is told by SLURM, Open MPI or Kubernetes, as JAX detects them, or by explicit coordinator
settings. `run_local` starts such processes on this machine. Everywhere, a rank that raises, dies or hangs ends all
ranks within a time limit, and its own traceback is what is shown.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .problem import InvalidInput

LIMIT = 600.0
"""Seconds after which a set of ranks that has not finished is ended."""
HEARTBEAT = 10
"""Seconds of silence after which the other ranks give a rank up."""
GRACE = 10.0
"""Seconds that a rank gets to print where it hangs, once its limit is over."""


class RankFailed(RuntimeError):
    """A rank raised, died or hung; the message begins with one line that says which, then its own output."""


def start_devices(count: int, processes: int = 1) -> None:
    """Makes sure that `count` devices are here: virtual ones without a GPU, if JAX has not started yet.

    Of `processes` processes each brings its share. Raises InvalidInput, with both numbers, when there are fewer.
    """
    if count < 1:
        raise InvalidInput(f"--ep is {count}; accepted: 1 or more ranks")
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        try:
            if jax.config.values["jax_num_cpu_devices"] < -(-count // processes):
                jax.config.update("jax_num_cpu_devices", -(-count // processes))
        except RuntimeError:  # JAX has started: the count below decides
            pass
    here = jax.device_count()
    if here < count:
        what = (
            f"{here} GPU{'s are' if here > 1 else ' is'}"
            if jax.default_backend() == "gpu"
            else f"{here} CPU devices are"
        )
        raise InvalidInput(f"--ep is {count} but {what} here; accepted: up to {here}")


def join(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> bool:
    """Joins the other processes of this run, if there are any; returns whether it did.

    With no argument JAX asks SLURM, Open MPI or Kubernetes, when one of them started more than one task; otherwise the
    process stays alone. The three arguments go together. Call before anything else touches a device. Raises InvalidInput
    for half a setting.
    """
    given = (coordinator, processes, process)
    if any(v is not None for v in given) and None in given:
        raise InvalidInput(
            f"coordinator {coordinator}, processes {processes}, process {process}; accepted: all three or none"
        )
    if coordinator is None and not _one_of_many():
        return False
    if process is not None and not 0 <= process < (processes or 0):
        raise InvalidInput(f"process is {process} of {processes}; accepted: 0 to {(processes or 0) - 1}")
    jax.distributed.initialize(
        coordinator_address=coordinator,
        num_processes=processes,
        process_id=process,
        heartbeat_timeout_seconds=HEARTBEAT,
    )
    return True


def to_host(tree: Any) -> Any:
    """The same structure with whole NumPy arrays, also of arrays that other processes hold parts of.

    A collective when there are several processes: each must call it on the same arrays.
    """

    def whole(a: Any) -> np.ndarray:
        if isinstance(a, jax.Array) and not (a.is_fully_addressable or a.is_fully_replicated):
            from jax.experimental import multihost_utils

            return np.asarray(multihost_utils.process_allgather(a, tiled=True))
        return np.asarray(a)

    return jax.tree.map(whole, tree)


@contextmanager
def joined(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None, limit: float = LIMIT
) -> Iterator[bool]:
    """Runs the body as one of several processes, if it is one (`join`), under `watched`; only the first one prints."""
    if not join(coordinator, processes, process):
        yield False
        return
    with watched(limit), ExitStack() as stack:
        if jax.process_index():
            silence = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(silence))
            stack.enter_context(redirect_stderr(silence))
        yield True
    jax.distributed.shutdown()


@contextmanager
def watched(limit: float = LIMIT) -> Iterator[None]:
    """Ends this process with a traceback when the body raises or takes longer than `limit` seconds.

    It does not wait for the other ranks, which would wait for it: they see its silence and end too. Bad input is one
    line and exit 2. Alone, an exception passes through.
    """
    if limit <= 0:
        raise InvalidInput(f"the limit is {limit:g} s; accepted: above 0")
    faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    except BaseException as error:
        if jax.process_count() == 1:
            raise
        if isinstance(error, InvalidInput):
            print(f"dropless: {error}", file=sys.__stderr__)
        else:
            print(f"process {jax.process_index()} of {jax.process_count()} failed:", file=sys.__stderr__)
            traceback.print_exc(file=sys.__stderr__)
        for stream in (sys.__stdout__, sys.__stderr__):
            if stream is not None:
                stream.flush()
        os._exit(2 if isinstance(error, InvalidInput) else 1)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _one_of_many() -> bool:
    """Whether a launcher that JAX can ask started this process as one of several."""
    tasks = max(int(os.environ.get(name, "1")) for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"))
    return (tasks > 1 and ("SLURM_PROCID" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ)) or (
        "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ
    )


def run_local(
    target: str, arguments: Any = None, *, processes: int, devices: int = 1, limit: float = LIMIT
) -> list[Any]:
    """Calls `package.module:function(arguments)` in `processes` CPU processes joined with each other.

    Each has `devices` virtual devices. Arguments and results are JSON; the results come in the order of the processes.
    Raises RankFailed when one raises, dies or is not done after `limit` seconds; none is left running.
    """
    if processes < 1 or devices < 1:
        raise InvalidInput(f"{processes} processes with {devices} devices; accepted: 1 or more of each")
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        ranks = []
        for process in range(processes):
            job = {
                "target": target,
                "arguments": arguments,
                "coordinator": f"127.0.0.1:{port}",
                "processes": processes,
                "process": process,
                "devices": devices,
                "ends": time.time() + limit,
                "result": f"{folder}/{process}.json",
            }
            with open(f"{folder}/{process}.log", "wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", __spec__.name, json.dumps(job)],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
                    )
                )
        try:
            _wait(ranks, folder, limit)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return [json.loads(Path(folder, f"{i}.json").read_text()) for i in range(processes)]


def _wait(ranks: list[subprocess.Popen], folder: str, limit: float) -> None:
    """Until all have ended well; the first that ends badly is the one to blame."""
    end = time.monotonic() + limit + GRACE
    while any(rank.poll() is None for rank in ranks):
        failed = [i for i, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
        if failed:
            break
        if time.monotonic() > end:
            hung = [i for i, rank in enumerate(ranks) if rank.poll() is None]
            raise RankFailed(f"rank {hung[0]} was not done after {limit:g} s\n{_log(folder, hung[0])}")
        time.sleep(0.05)
    for i, rank in enumerate(ranks):
        if rank.returncode not in (None, 0):
            raise RankFailed(f"rank {i} of {len(ranks)} ended with status {rank.returncode}\n{_log(folder, i)}")


def _log(folder: str, process: int) -> str:
    return Path(folder, f"{process}.log").read_text(errors="replace")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(job: dict[str, Any]) -> None:
    """One process of `run_local`."""
    faulthandler.enable()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", job["devices"])
    # Starting counts too: all ranks end at one moment, however long each took to import.
    with watched(max(job["ends"] - time.time(), 1.0)):
        join(job["coordinator"], job["processes"], job["process"])
        module, _, name = job["target"].partition(":")
        result = getattr(importlib.import_module(module), name)(job["arguments"])
        Path(job["result"]).write_text(json.dumps(result))
        jax.distributed.shutdown()


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))
