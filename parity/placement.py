"""Which rank holds which tokens and which experts, on any mesh.

Ranks are numbered with the data axes outside, in the mesh's order, and the expert axis innermost: rank w of W has the
experts of its place on the expert axis, w mod ep, and exchanges tokens only with the ep ranks of its own data group.
Replicated axes hold copies and are no ranks of their own.
"""

from __future__ import annotations

from .problem import InvalidInput, Mesh, Problem


def token_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes that split the tokens, outermost first; the expert axis is the last."""
    kept = [name for name, _ in mesh.axes if name != mesh.ep_axis and name not in mesh.replicated]
    return (*kept, mesh.ep_axis)


def token_ranks(mesh: Mesh) -> int:
    """W, the number of ranks that hold different tokens."""
    sizes = dict(mesh.axes)
    ranks = 1
    for name in token_axes(mesh):
        ranks *= sizes[name]
    return ranks


def expert_ranks(problem: Problem, ranks: int) -> int:
    """The size of the expert axis when tokens lie on `ranks` ranks; without a mesh all of them are expert ranks.

    Raises InvalidInput when the mesh has another number of ranks, or E does not divide.
    """
    if problem.mesh is not None:
        check_mesh(problem.mesh)
        if token_ranks(problem.mesh) != ranks:
            raise InvalidInput(
                f"tokens lie on {ranks} ranks; accepted: {token_ranks(problem.mesh)}, as the mesh "
                f"{describe(problem.mesh)} has it"
            )
        return problem.mesh.ep
    if ranks < 1 or problem.E % ranks:
        raise InvalidInput(
            f"{problem.E} experts do not divide over {ranks} ranks; accepted: a number of ranks that divides {problem.E}"
        )
    return ranks


def check_mesh(mesh: Mesh) -> None:
    """Raises InvalidInput, naming the axis, for a grid that cannot be built on any number of devices."""
    names = [name for name, _ in mesh.axes]
    if len(set(names)) != len(names):
        raise InvalidInput(f"mesh axes are {', '.join(names)}; accepted: different names")
    for name, size in mesh.axes:
        if size < 1:
            raise InvalidInput(f"mesh axis {name} has size {size}; accepted: 1 or more")
    for name in mesh.replicated:
        if name not in names:
            raise InvalidInput(f"replicated axis {name!r} is not in the mesh; accepted: {', '.join(names)}")
    if mesh.ep_axis in mesh.replicated:
        raise InvalidInput(f"the expert axis {mesh.ep_axis!r} is replicated; accepted: an axis that splits the tokens")


def describe(mesh: Mesh) -> str:
    """The grid in one short phrase, such as `data 2 x expert 4`."""
    return " x ".join(f"{name} {size}{' (copies)' if name in mesh.replicated else ''}" for name, size in mesh.axes)


def expert_mesh(ep: int, *, data: int = 1, copies: int = 1) -> Mesh:
    """A mesh of `data` x `ep` ranks, each held by `copies` devices; axes of size one are left out."""
    axes = [("data", data)] if data > 1 else []
    axes.append(("expert", ep))
    if copies > 1:
        axes.append(("copy", copies))
    return Mesh(axes=tuple(axes), ep_axis="expert", replicated=("copy",) if copies > 1 else ())
