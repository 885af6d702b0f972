"""What the suite itself does where it runs."""

from types import SimpleNamespace

import pytest

from tests.conftest import pytest_addoption


@pytest.mark.parametrize(("plugins", "added"), [({"timeout"}, []), (set(), ["timeout"])])
def test_a_machine_without_pytest_timeout_runs_it(plugins, added):
    """Its option in pyproject.toml would be unknown there, which pytest warns of, and warnings are errors."""
    names = []
    parser = SimpleNamespace(addini=lambda name, help: names.append(name))
    pytest_addoption(parser, SimpleNamespace(has_plugin=plugins.__contains__))
    assert names == added
