"""Course machinery. The engine installed from a wheel: whole, and at work in another environment and another folder.

Protects `pip install`: a forgotten data file would be noticed by users only.
"""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

from scripts.setup_env import venv_python

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "The capital of France is"
MOST_BYTES = 20_000_000
WITHOUT = """
import sys
sys.modules[{package!r}] = None  # as if it were not installed
from mini_engine.__main__ import main
sys.exit(main({arguments}))
"""

pytestmark = pytest.mark.nightly


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

    def refused(self, *command: str) -> tuple[int, str]:
        """Run a command that does not succeed; return its exit code and what it says on standard error."""
        with pytest.raises(Failed) as failed:
            self.run(*command)
        return failed.value.done.returncode, failed.value.done.stderr


class Failed(AssertionError):
    """A command did not succeed. done: how it ended."""

    def __init__(self, done: subprocess.CompletedProcess) -> None:
        super().__init__(f"{done.args} failed:\n{done.stdout}{done.stderr}")
        self.done = done


def run(*command: str | Path, **options) -> subprocess.CompletedProcess:
    done = subprocess.run(list(map(str, command)), capture_output=True, encoding="utf-8", timeout=300, **options)
    if done.returncode:
        raise Failed(done)
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


def test_the_source_distribution_is_of_the_package_and_not_of_the_course(tmp_path: Path):
    program = "import sys; from hatchling.build import build_sdist; print(build_sdist(sys.argv[1]))"
    name = run(sys.executable, "-c", program, tmp_path, cwd=ROOT).stdout.split()[-1]
    with tarfile.open(tmp_path / name) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers()}
    assert {name.partition("/")[0] for name in names} <= {
        "mini_engine", "CHANGELOG.md", "CITATION.cff", "LICENSE", "PYPI.md", "README.md", "pyproject.toml", "PKG-INFO",
        ".gitignore",
    }  # fmt: skip
    assert {"PYPI.md", "LICENSE", "mini_engine/pocket/model.safetensors", "mini_engine/layers/layers.cpp"} <= names
    assert (tmp_path / name).stat().st_size < MOST_BYTES


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [
        ("fastapi", ["serve"], "server"),
        ("prometheus_client", ["serve"], "server"),
        ("ray", ["serve", "--replicas", "2", "--port", "0"], "distributed"),
        ("zmq", ["serve", "--port", "0", "--kv-events", "tcp://127.0.0.1:*"], "events"),
    ],
)
def test_a_command_without_its_extra_says_which_in_one_sentence(installed: Installed, package, arguments, extra):
    program = WITHOUT.format(package=package, arguments=arguments)
    code, said = installed.refused("python", "-c", program)
    assert code == 2 and said.count("\n") == 1, said
    assert f"the extra '{extra}'" in said and f"({package} is missing)" in said


def test_the_package_is_the_wheel_s_and_not_the_repository_s(installed: Installed):
    program = "import mini_engine, importlib.metadata as m; print(m.version('kv-course'), mini_engine.__version__)"
    versions = installed.run("python", "-c", program).stdout.split()
    assert versions[0] == versions[1] == installed.wheel.name.split("-")[1], "one version, wherever it is asked for"
    found = installed.run("python", "-c", "import mini_engine; print(mini_engine.__file__)").stdout.strip()
    assert Path(found).is_relative_to(installed.venv)


@pytest.mark.parametrize("start", [["mini-engine"], ["python", "-m", "mini_engine"]], ids=" ".join)
def test_the_pocket_model_answers(installed: Installed, start: list[str]):
    done = installed.run(*start, "generate", PROMPT, "--max-tokens", "5")
    assert done.stdout.startswith(" Paris"), done
