"""The grid of devices behind a `Problem.mesh`, and how each array of a layer lies on it."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ...parity.interface import Support
from ...parity.placement import check_mesh, describe, expert_mesh, token_axes
from ...parity.problem import InvalidInput, Mesh, Problem


def mesh_of(problem: Problem) -> Mesh:
    """The problem's mesh, or expert parallelism over as many of the devices here as divide its experts."""
    if problem.mesh is not None:
        return problem.mesh
    devices = jax.device_count()
    return expert_mesh(max(n for n in range(1, min(devices, problem.E) + 1) if problem.E % n == 0))


@functools.lru_cache
def device_mesh(mesh: Mesh) -> jax.sharding.Mesh:
    """The first devices of the backend (of every process, in their global order) as the named grid.

    Raises InvalidInput when the grid is malformed or has more devices than are here.
    """
    check_mesh(mesh)
    devices = jax.devices()
    if mesh.devices > len(devices):
        raise InvalidInput(
            f"the mesh {describe(mesh)} needs {mesh.devices} devices, {len(devices)} are here; accepted: up to {len(devices)}"
        )
    grid = np.array(devices[: mesh.devices]).reshape([size for _, size in mesh.axes])
    return jax.sharding.Mesh(grid, [n for n, _ in mesh.axes], axis_types=(AxisType.Auto,) * len(mesh.axes))


def fits(problem: Problem) -> Support:
    """Whether the problem's mesh can be laid on the devices here; the reason names the number that failed."""
    try:
        device_mesh(mesh_of(problem))
    except InvalidInput as error:
        return Support(False, str(error))
    return Support(True)


def by_token(mesh: Mesh) -> PartitionSpec:
    """The leading dimension split over the token axes, the rest whole."""
    return PartitionSpec(token_axes(mesh))


def by_expert(mesh: Mesh) -> PartitionSpec:
    """The leading dimension split over the expert axis, copied over every other."""
    return PartitionSpec(mesh.ep_axis)


def put(mesh: Mesh, spec: PartitionSpec, value: np.ndarray) -> jax.Array:
    """A global array from the same host value in every process; each process keeps only its devices' parts."""
    sharding = NamedSharding(device_mesh(mesh), spec)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
