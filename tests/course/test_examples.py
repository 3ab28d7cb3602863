"""Course machinery. hypothesis tries the same examples in every run, whatever else the run has imported.

Protects students from `check 5` and `check 5 --task 2` that disagree because they tried different examples.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location

from hypothesis import given
from hypothesis import strategies as st


def examples():
    """Return all that hypothesis tries for one test."""
    tried = []

    @given(st.lists(st.tuples(st.integers(0, 2**40), st.floats(0, 1), st.text())))
    def attempt(example):
        tried.append(example)

    attempt()
    return tried


def test_the_examples_do_not_depend_on_what_was_imported(tmp_path, monkeypatch):
    before = examples()
    source = tmp_path / "another_module.py"  # such as a student's file, or what another test imports
    source.write_text("\n".join(f"N{i} = {10**9 + i}, {i / 777}, 'word {i}'" for i in range(200)), encoding="utf-8")
    spec = spec_from_file_location(source.stem, source)
    assert spec and spec.loader
    spec.loader.exec_module(module := module_from_spec(spec))
    monkeypatch.setitem(sys.modules, source.stem, module)
    assert examples() == before, "a lesson's check and the check of one of its tasks would try different examples"
