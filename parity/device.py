"""What is here: device, driver and library versions, flags. Never a host name, a user or a path."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
from collections.abc import Callable
from typing import Any

import jax

PACKAGES = {
    "jax": ("jax",),
    "jaxlib": ("jaxlib",),
    "numpy": ("numpy",),
    "transformer_engine": (
        "transformer_engine",
        "transformer-engine",
        "transformer_engine_jax",
        "transformer_engine_cu13",
    ),
}
"""Python packages whose version a result depends on, and the distribution names they go by."""

CUDA_PACKAGES = {
    "cublas": ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"),
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}
"""Where a CUDA library's version is read when the library is not loaded yet."""


def environment() -> dict[str, Any]:
    """The facts a result depends on, as plain values.

    A CUDA library's version is the loaded library's own answer where it is loaded, else the installed package's;
    `versions_from` says which. Values that cannot be read are None.
    """
    device = jax.devices()[0]
    versions: dict[str, str | None] = {name: _installed(names) for name, names in PACKAGES.items()}
    sources: dict[str, str] = {}
    if device.platform == "gpu":
        for name, read in LOADED.items():
            loaded = read()
            versions[name] = loaded or _installed(CUDA_PACKAGES[name])
            sources[name] = "loaded" if loaded else "package"
    return {
        "platform": device.platform,
        "device_kind": device_kind(),
        "device_count": jax.device_count(),
        "compute_capability": compute_capability(),
        "driver": driver_version(),
        "versions": versions,
        "versions_from": sources,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": cores(),
        "flags": {k: v for k in FLAGS if (v := os.environ.get(k))},
        "matmul_precision": str(getattr(jax.config, "jax_default_matmul_precision", None) or "default"),
    }


FLAGS = (
    "XLA_FLAGS",
    "JAX_PLATFORMS",
    "NVTE_JAX_ENFORCE_V2_GROUPED_GEMM",
    "NVTE_USE_CUTLASS_GROUPED_GEMM",
    "NCCL_NVLS_ENABLE",
)
"""Environment variables that change results or speed; their values hold no paths in ordinary use."""


def device_kind() -> str:
    """The device's name; on CPU the processor's, since JAX says only "cpu"."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:  # not Linux: the platform module knows a coarser name
        pass
    return platform.processor() or platform.machine()


def device_class(env: dict[str, Any]) -> str:
    """What must match for absolute times to be comparable: the platform and device, and the core count on CPU."""
    kind = re.sub(r"[^a-z0-9]+", "-", str(env.get("device_kind", "")).lower()).strip("-")
    return f"cpu-{env.get('cores')}" if env.get("platform") == "cpu" else f"{kind}-x{env.get('device_count', 1)}"


def compute_capability() -> float | None:
    """9.0 for Hopper; None without a CUDA GPU."""
    value = getattr(jax.devices()[0], "compute_capability", None)
    return float(value) if value and jax.devices()[0].platform == "gpu" else None


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def driver_version() -> str | None:
    """The NVIDIA kernel driver's version, or None."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", file.read())
            return found.group(1) if found else None
    except OSError:
        return None


def describe(env: dict[str, Any]) -> str:
    """One line for a table's head."""
    v = env["versions"]
    parts = [env["device_kind"]]
    if env["platform"] == "cpu":
        parts[0] += f", {env['cores']} cores"
    elif env["device_count"] > 1:
        parts[0] = f"{env['device_count']} x {parts[0]}"
    parts.append(f"jax {v['jax']}")
    parts += [f"{name} {v[key]}" for key, name in (("transformer_engine", "TE"), ("cublas", "cuBLAS")) if v.get(key)]
    return " · ".join(parts)


def _installed(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _loaded_library(stem: str) -> ctypes.CDLL | None:
    """The library already mapped into this process; loading another copy would report the wrong one.

    Asked for by name, not by path: where two copies are mapped, that gives the one that other libraries get.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8") as lines:
            mapped = {os.path.basename(line.rstrip("\n")) for line in lines}
        for name in sorted(mapped):
            if re.match(rf"{stem}\.so", name):
                return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    return None


def _cublas() -> str | None:
    library = _loaded_library("libcublasLt")
    if library is None:
        return None
    call = library.cublasLtGetVersion
    call.restype = ctypes.c_size_t
    return _dotted(int(call()), (10000, 100))


def _cudnn() -> str | None:
    library = _loaded_library("libcudnn")
    if library is None:
        return None
    call = library.cudnnGetVersion
    call.restype = ctypes.c_size_t
    return _dotted(int(call()), (10000, 100))


def _nccl() -> str | None:
    library = _loaded_library("libnccl")
    value = ctypes.c_int()
    if library is None or library.ncclGetVersion(ctypes.byref(value)) != 0:
        return None
    return _dotted(value.value, (10000, 100))


def _dotted(number: int, units: tuple[int, int]) -> str:
    major, rest = divmod(number, units[0])
    minor, patch = divmod(rest, units[1])
    return f"{major}.{minor}.{patch}"


LOADED: dict[str, Callable[[], str | None]] = {"cublas": _cublas, "cudnn": _cudnn, "nccl": _nccl}
