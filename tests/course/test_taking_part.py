"""Course machinery. What a stranger meets first: issue forms, workflows, a release.

Protects people who have no clone yet, for whom a wrong key in one of these files is a form that GitHub does not show
or a release that any push could trigger. GitHub reports none of that to a test.
"""

import re
import shlex
from pathlib import Path

from scripts import refused
from scripts.release.versions import differences

import pytest
import yaml

from lessons._course.pages import Page

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = [*sorted((ROOT / ".github/workflows").glob("*.yml")), ROOT / "lessons/classroom/grade.yml"]


def name(path: Path) -> str:
    return path.name


def read(path: str | Path):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


# Workflows


@pytest.mark.parametrize("path", WORKFLOWS, ids=name)
def test_a_workflow_ends_and_may_only_read(path):
    workflow = read(path)
    assert workflow.keys() <= {"name", True, "permissions", "env", "concurrency", "jobs"}, "`on` is read as True"
    assert workflow["permissions"] == {"contents": "read"}, "a job that may write says so itself"
    for job in workflow["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 60 and job["runs-on"] and job["steps"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step) and step.get("uses", "a@v1").count("@") == 1


def test_only_a_tag_publishes_and_only_what_was_tried():
    jobs = read(".github/workflows/release.yml")["jobs"]
    may_write = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert may_write == {"publish": {"id-token": "write"}}, "the key of PyPI is for one job"
    assert jobs["publish"]["if"] == "github.ref_type == 'tag'" and jobs["publish"]["environment"]["name"] == "pypi"
    assert (jobs["publish"]["needs"], jobs["try"]["needs"]) == ("try", "build")
    text = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    assert "secrets." not in text and "twine check --strict" in text
    assert all("checkout" not in step.get("uses", "") for job in ("try", "publish") for step in jobs[job]["steps"])


# Issues and pull requests


def test_the_forms_name_a_command_that_takes_these_options(capsys):
    text = (ROOT / ".github/ISSUE_TEMPLATE/refused-answer.yml").read_text(encoding="utf-8")
    [command] = re.findall(r"python scripts/refused\.py (.+)", text)
    with pytest.raises(SystemExit) as left:
        refused.main([*shlex.split(command), "--help"])
    assert left.value.code == 0 and "--out" in capsys.readouterr().out
    assert refused.FORM.endswith("refused-answer.yml"), "the command leads to the form"


# Versions and what PyPI shows


def test_one_version_everywhere():
    assert differences(ROOT) == []


@pytest.fixture
def three_files(tmp_path) -> Path:
    (tmp_path / "mini_engine").mkdir()
    texts = {
        "mini_engine/__init__.py": '__version__ = "0.3.0"\n',
        "CITATION.cff": "cff-version: 1.2.0\nversion: 0.3.0\n",
    }
    for file, text in (texts | {"CHANGELOG.md": "# Changes\n\n## 0.3.0 - 2026-12-01\n\n## 0.2.0\n"}).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "tag", "says"),
    [
        ("CITATION.cff", "cff-version: 1.2.0\nversion: 0.2.0\n", "", "CITATION.cff says 0.2.0"),
        ("CITATION.cff", "cff-version: 1.2.0\n", "", "CITATION.cff says none"),
        ("CHANGELOG.md", "## 0.2.0\n", "", "first version is 0.2.0"),
        ("CHANGELOG.md", "## 0.3.0\n", "v0.3.0", "has no date"),
        ("CHANGELOG.md", "## 0.3.0 - soon\n", "v0.3.0", "has no date"),
        ("CHANGELOG.md", "## 0.3.0 - 2026-12-01\n", "0.3.0", "the tag is 0.3.0"),
        ("CHANGELOG.md", "## 0.3.0 - 2026-12-01\n", "v0.4.0", "the tag is v0.4.0"),
    ],
)
def test_a_release_that_contradicts_itself_is_named(three_files, file, text, tag, says):
    assert differences(three_files, "v0.3.0") == []
    (three_files / file).write_text(text, encoding="utf-8")
    [said] = differences(three_files, tag)
    assert says in said


def test_every_link_of_pypi_s_page_is_absolute():
    targets = [link.target for link in Page.read(ROOT / "PYPI.md").links]
    assert targets and all(target.startswith("https://") for target in targets), "PyPI does not have the other files"
