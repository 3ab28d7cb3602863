"""Course machinery. The notebook for Colab and Kaggle: it is current, holds no outputs, and runs from end to end.

Protects a stranger's first hour. Two cells are other ones in the test: it copies this checkout instead of cloning, and
links this environment instead of installing. Neither Colab nor Kaggle has run it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.pages import notebook

import pytest

from lessons._course.places import Places

ROOT = notebook.ROOT
CELLS = {cell["id"]: "".join(cell["source"]) for cell in json.loads(notebook.FILE.read_text(encoding="utf-8"))["cells"]}
PATIENCE = 600  # seconds for a cell


def test_its_links_and_scripts_exist():
    text = "\n".join(CELLS.values())
    for path in re.findall(r"(?:tree|blob)/main/([\w/.]+)", text) + re.findall(r"scripts/\w+\.py", text):
        assert (ROOT / path).exists(), path
    assert f"{notebook.REPO}/issues/new?template=report.yml" in text
    assert (ROOT / ".github" / "ISSUE_TEMPLATE" / "report.yml").is_file()


# ---------------------------------------------------------------- from end to end


def copy_of_checkout(folder: Path) -> Path:
    """Copy the repository's files as they are now, committed or not, with a git repository of their own."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"],
        capture_output=True, encoding="utf-8", check=True,
    )  # fmt: skip
    copy = folder / "kv-course"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(copy), *command], check=True)
    return copy


def solved() -> str:
    """Return the exercise's cell as a student leaves it who has solved both tasks."""
    reference = (ROOT / "mini_engine" / "kv" / "allocator.py").read_text(encoding="utf-8")
    return f"%%writefile {notebook.EXERCISE}\n{reference}"


def executed(folder: Path, monkeypatch, cells: dict[str, str]) -> dict[str, str]:
    """Run the notebook with other sources in some cells. Return what each cell of code printed or showed."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "kv-course"), *sys.path]))
    monkeypatch.delenv("KV_COURSE_WORK", raising=False)
    book = nbformat.read(notebook.FILE, as_version=4)
    nbformat.validate(book)
    for cell in book.cells:
        cell.source = cells.get(cell.id, cell.source)
    nbclient.NotebookClient(book, timeout=PATIENCE, resources={"metadata": {"path": str(folder)}}).execute()
    return {cell.id: "".join(map(text_of, cell.outputs)) for cell in book.cells if cell.cell_type == "code"}


def text_of(output) -> str:
    """Return an output's text; Markdown as it is shown."""
    if output["output_type"] == "stream":
        return output["text"]
    return output.get("data", {}).get("text/markdown", "") or "".join(output.get("traceback", ()))


@pytest.mark.nightly
@pytest.mark.skipif(os.name == "nt" or shutil.which("git") is None, reason="its commands are for Linux")
def test_it_runs_from_end_to_end(tmp_path, monkeypatch):
    copy = copy_of_checkout(tmp_path)
    environment = Places.find().root / ".venv"
    assert (environment / "bin" / "python").exists(), "NOT CHECKED without .venv; run make setup"
    cells = {
        "clone": f"%cd {copy}",
        "install": f"!ln -s {environment} .venv",
        "smoke": CELLS["smoke"] + " --only 0,2",
        "report": CELLS["report"].replace("QUICK = False", "QUICK = True"),
        "exercise": solved(),
    }
    assert all(text != CELLS[name] for name, text in cells.items()), "the test changes what is no longer there"
    said = executed(tmp_path, monkeypatch, cells)
    assert "Every token is equal" in said["smoke"]
    assert "All parts are right." in said["report"] and "See below" not in said["report"], said["page"]
    assert "Written: " in said["start"] and "allocator.py" in said["start"]
    assert "Overwriting work/l2/allocator.py" in said["exercise"]
    assert "Task 2 is done" in said["check"] and "Task 3 is done" in said["check"], said["check"]
    page = said["page"]
    assert page.startswith("# A machine's report") and "676 of 676 tokens of 6 lessons" in " ".join(page.split())
