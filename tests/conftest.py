"""One strict JAX for every test: eight virtual CPU devices, no silent dtype promotion, and skips that say why."""

import os

# Before JAX initialises its backends, or the flag is ignored.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

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
