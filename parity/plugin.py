"""A pytest plugin: `pytest --dropless-target package.module:attribute` adds one test for each law.

Without the option it adds nothing, and imports nothing beyond pytest. Laws run in a worker process, as `dropless check`
runs them; a law that does not apply is skipped with its reason, a failure shows what `check` prints.
"""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options, each the one of `dropless check` after its prefix."""
    group = parser.getgroup("dropless", "laws of a Mixture-of-Experts layer")
    group.addoption("--dropless-target", metavar="TARGET", help="a registered name, or package.module:attribute")
    group.addoption("--dropless-profile", default="quick", help="quick, default, thorough or gpu")
    group.addoption("--dropless-seed", type=int, default=0, help="of the drawn routings")
    group.addoption("--dropless-max-examples", type=int, help="drawn routings for each law and shape")
    group.addoption(
        "--dropless-with", default="", help="what a bare function computes beyond gated SiLU: bias,clamp,..."
    )
    group.addoption("--dropless-dtypes", default="", help="dtypes to judge, separated by commas")
    group.addoption("--dropless-arrays", default="jax", help="jax, numpy or torch")
    group.addoption("--dropless-known", action="append", default=[], metavar="FILE", help="a file of known failures")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Adds the laws behind the project's own tests."""
    target = config.getoption("--dropless-target")
    if target and not any(isinstance(item, LawItem) for item in items):
        from .laws import LAWS

        parent = LawCollector.from_parent(session, name=f"dropless[{target}]", nodeid=f"dropless[{target}]")
        items += [LawItem.from_parent(parent, name=law.name) for law in LAWS]


class LawCollector(pytest.Collector):
    """The laws of one target, and the worker that judges them."""

    worker: Any = None
    known: Any = None
    refused: Exception | None = None
    """What kept the worker from starting: every law says it, and none tries again."""

    def collect(self) -> list[pytest.Item]:
        """Nothing: its items are added after collection, when no path asks for them."""
        return []

    def judge(self, name: str) -> Any:
        """One law's verdict; the worker starts with the first and ends with the session."""
        from .known import SHIPPED, apply_known, read_known

        if self.refused is not None:
            raise self.refused
        if self.worker is None:
            try:
                files: Any = self.config.getoption("--dropless-known")
                self.known = [e for path in (SHIPPED, *files) for e in read_known(path)]
                self.worker = self._start()
            except _refusals() as error:
                self.refused = error
                raise
            self.config.add_cleanup(self.worker.close)
        verdict = self.worker.judge(name)
        return apply_known([verdict], self.known, self.worker.job.target)[0]

    def _start(self) -> Any:
        from .job import Job
        from .profiles import profile
        from .worker import Worker

        def option(name: str) -> Any:
            return self.config.getoption(name)

        job = Job(
            option("--dropless-target"),
            option("--dropless-profile"),
            option("--dropless-seed"),
            option("--dropless-max-examples"),
            tuple(w for w in option("--dropless-with").split(",") if w),
            tuple(w for w in option("--dropless-dtypes").split(",") if w),
            option("--dropless-arrays"),
        )
        worker = Worker(job, profile(job.profile).timeout_s)
        try:
            if worker.start().undecided:
                worker.probe()
        except BaseException:
            worker.close()
            raise
        return worker


class LawItem(pytest.Item):
    """One law."""

    def runtest(self) -> None:
        """Judges the law: a skip when it does not apply, a failure when it does not hold."""
        from .check import describe
        from .verdict import BAD

        assert isinstance(self.parent, LawCollector)
        verdict = self.parent.judge(self.name)
        if verdict.status in BAD:
            raise LawFailed("\n".join(describe(self.parent.worker.job, verdict)))
        if verdict.status != "agree":
            pytest.skip(f"{verdict.status}: {verdict.reason}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What `dropless check` prints, without a traceback through this plugin."""
        if isinstance(excinfo.value, LawFailed):
            return str(excinfo.value)
        if isinstance(excinfo.value, _refusals()):
            return f"dropless: {' '.join(str(excinfo.value).split())}"
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """The name in reports."""
        return self.path, None, f"{self.parent.name if self.parent else ''}::{self.name}"


class LawFailed(Exception):
    """A law does not hold; the message is its description."""


def _refusals() -> tuple[type[Exception], ...]:
    """What says in one line why nothing can be judged."""
    from .interface import Unsupported
    from .job import NotCallable
    from .problem import InvalidInput

    return InvalidInput, NotCallable, Unsupported
