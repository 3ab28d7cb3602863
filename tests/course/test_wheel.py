"""Course machinery. The engine installed from a wheel: whole, and at work in another environment and another folder.

Protects `pip install`: a forgotten data file would be noticed by users only.
"""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

from scripts.setup_env import venv_python

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "The capital of France is"

pytestmark = pytest.mark.slow("mini_engine", "pyproject.toml", "README.md")


class Installed(NamedTuple):
    """A wheel, and an environment that it is installed in."""

    wheel: Path
    venv: Path

    def run(self, *command: str) -> subprocess.CompletedProcess:
        """Run a command of the environment elsewhere than in the repository, and with nothing that leads there."""
        program, *arguments = command
        path = venv_python(self.venv).with_stem(program)
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return run(path, *arguments, cwd=self.wheel.parent, env=env)


def run(*command: str | Path, **options) -> subprocess.CompletedProcess:
    done = subprocess.run(list(map(str, command)), capture_output=True, encoding="utf-8", timeout=300, **options)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}{done.stderr}"
    return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Installed:
    """Built and installed without an index. What the engine needs, torch above all, is taken from this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    offline = ("--no-deps", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "wheel", *offline, "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv")
    python = venv_python(folder / "venv")
    run(sys.executable, "-m", "pip", "--python", python, "install", *offline, wheel)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    # A line in a .pth file adds that folder and no more: not what an editable install in there points to.
    lent = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "lent.pth").write_text("\n".join(lent) + "\n", encoding="utf-8")
    return Installed(wheel, folder / "venv")


def test_every_file_of_the_engine_is_in_the_wheel(installed: Installed):
    files = (path for path in (ROOT / "mini_engine").rglob("*") if path.is_file() and path.suffix != ".pyc")
    wanted = {path.relative_to(ROOT).as_posix() for path in files}
    assert {"mini_engine/py.typed", "mini_engine/layers/layers.cpp", "mini_engine/pocket/chat_template.jinja"} <= wanted
    with zipfile.ZipFile(installed.wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == wanted, "the model, the chat template and the C++ are needed as much as the Python"


def test_the_package_is_the_wheel_s_and_not_the_repository_s(installed: Installed):
    program = "import mini_engine, importlib.metadata as m; print(m.version('kv-course'), mini_engine.__version__)"
    versions = installed.run("python", "-c", program).stdout.split()
    assert versions[0] == versions[1] == installed.wheel.name.split("-")[1], "one version, wherever it is asked for"
    found = installed.run("python", "-c", "import mini_engine; print(mini_engine.__file__)").stdout.strip()
    assert Path(found).is_relative_to(installed.venv)


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["serve"]], ids=" ".join)
def test_the_command_is_there_and_knows_its_name(installed: Installed, command: list[str]):
    assert installed.run("mini-engine", *command, "--help").stdout.startswith(
        " ".join(["usage: mini-engine", *command])
    )


@pytest.mark.parametrize("start", [["mini-engine"], ["python", "-m", "mini_engine"]], ids=" ".join)
def test_the_pocket_model_answers(installed: Installed, start: list[str]):
    done = installed.run(*start, "generate", PROMPT, "--max-tokens", "5")
    assert done.stdout.startswith(" Paris"), done


def test_the_chat_template_is_found(installed: Installed):
    arguments = ("generate", "What is the capital of Japan?", "--chat", "--max-tokens", "12")
    assert "Tokyo" in installed.run("mini-engine", *arguments).stdout


def test_the_front_door_opens_where_the_repository_is_not(installed: Installed):
    program = (
        "from mini_engine import LLM, SamplingParams\n"
        "with LLM(num_blocks=32) as llm:\n"
        f"    print(llm.generate({PROMPT!r}, SamplingParams(temperature=0, max_tokens=3), progress=False)[0].text)"
    )
    assert installed.run("python", "-c", program).stdout.startswith(" Paris")
