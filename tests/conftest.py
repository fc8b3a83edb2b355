"""One strict JAX for every test: eight virtual CPU devices, no silent dtype promotion, and skips that say why."""

import gc
import importlib.util
import os
import sys
from typing import Any

import jax
import pytest

# Before JAX initialises its backends, or the flags are ignored. Compiling is what the tests wait for, and on a CPU much of it
# is LLVM making tiny programs fast that run a few times. Where a GPU plugin is installed, its kernels are what is tested, and
# benchmarks time programs as users compile them.
QUICK = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    # A program is tiny, and the workers of pytest-xdist keep the other cores busy.
    "--xla_cpu_parallel_codegen_split_count=1",
]
# Code of plain LLVM instead of MLIR compiles in less than half the time. Later versions know no such flag and end the process.
if jax.__version_info__ < (0, 11):
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        *(QUICK if importlib.util.find_spec("jax_plugins") is None and "--benchmark-only" not in sys.argv else []),
    ]
).strip()

# A bfloat16 operand that meets a float32 one is a rounding that no table allows; make it an error.
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.hookimpl(optionalhook=True)  # pytest-xdist need not be there
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Workers take long runs of neighbouring tests, which share executables, and steal what another has not begun."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collection_finish() -> None:
    """Tracing makes many objects that live on: what is there already, and what is young, need not be looked through so often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs another machine, with the number that failed."""
    device = jax.devices()[0]
    capability = float(getattr(device, "compute_capability", None) or 0)
    for item in items:
        if item.get_closest_marker("gpu") and capability < 9.0:
            item.add_marker(
                pytest.mark.skip(reason=f"needs compute capability 9.0, {device.device_kind} has {capability}")
            )
        if (mark := item.get_closest_marker("world_size")) and jax.device_count() < mark.args[0]:
            item.add_marker(pytest.mark.skip(reason=f"needs {mark.args[0]} devices, {jax.device_count()} are here"))
