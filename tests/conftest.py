"""One strict JAX for every test: eight virtual CPU devices, no silent dtype promotion, and skips that say why."""

import importlib.util
import os

# Before JAX initialises its backends, or the flags are ignored. Compiling is what the tests wait for, and on a CPU much of it
# is LLVM making tiny programs fast that run a few times. Where a GPU plugin is installed, its kernels are what is tested.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        *(
            ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
            if importlib.util.find_spec("jax_plugins") is None
            else []
        ),
    ]
).strip()

import jax
import pytest

# A bfloat16 operand that meets a float32 one is a rounding that no table allows; make it an error.
jax.config.update("jax_numpy_dtype_promotion", "strict")


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
