"""A plugin of pytest: hypothesis says that a test fails, and looks for no smaller example."""

from __future__ import annotations

from hypothesis import Phase, settings


def pytest_collection() -> None:
    quick = settings(settings.default, phases=(Phase.explicit, Phase.generate), database=None)
    settings.register_profile("mutants", quick)
    settings.load_profile("mutants")
