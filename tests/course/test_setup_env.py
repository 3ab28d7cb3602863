"""Course machinery. The script that makes .venv: which torch it picks, when it starts over, what it rejects.

Protects newcomers' first command, `make`: it must neither delete a folder of theirs nor download gigabytes in vain.
"""

import ast
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import scripts
import scripts.setup
from scripts import setup_env
from scripts.setup import steps as setup_steps
from scripts.setup_env import CPU_INDEX, Machine, Marker, SetupError, choose_torch, make_plan

import pytest


def machine(system: str, cpu: str = "x86_64", has_nvidia: bool = False, answers: bool = True) -> Machine:
    return Machine(system, cpu, has_nvidia, lambda: answers)


def must_not_ask():
    raise AssertionError("no index is asked where the answer changes nothing")


@pytest.mark.parametrize(
    ("here", "index"),
    [
        (machine("Linux"), CPU_INDEX),
        (machine("Linux", "aarch64"), CPU_INDEX),
        (machine("Linux", answers=False), ""),
        (Machine("Linux", "x86_64", True, must_not_ask), ""),
        (Machine("Darwin", "arm64", False, must_not_ask), ""),
        (Machine("Windows", "AMD64", False, must_not_ask), ""),
        (Machine("Windows", "AMD64", True, must_not_ask), ""),
    ],
)
def test_only_linux_without_a_driver_takes_torch_from_the_cpu_index(here: Machine, index: str):
    assert choose_torch(here).index == index


@pytest.fixture
def index() -> Iterator[str]:
    """A local index that has torch only at /good and never responds at /slow."""
    leaving = threading.Event()

    class Index(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path.startswith("/slow"):
                leaving.wait(60)
            self.send_response(200 if self.path == "/good/torch/" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        leaving.set()
        server.shutdown()


@pytest.mark.parametrize(("path", "answers"), [("/good", True), ("/other", False), ("/slow", False)])
def test_the_cpu_index_is_used_only_if_it_responds_in_time(index: str, path: str, answers: bool, monkeypatch):
    monkeypatch.setattr(setup_env, "CPU_INDEX", index + path)
    assert setup_env.cpu_index_answers(seconds=0.3 if path == "/slow" else 30) is answers


def test_on_an_intel_mac_setup_says_that_there_is_no_torch():
    with pytest.raises(SetupError, match="Intel Macs"):
        choose_torch(machine("Darwin", "x86_64"))


@pytest.mark.parametrize("version", [(3, 11, 0), (3, 14, 9)])
def test_supported_pythons_are_accepted(version):
    setup_env.check_python(version)


@pytest.mark.parametrize("version", [(3, 6, 8), (3, 10, 14), (3, 15, 0)])
def test_other_pythons_are_rejected_with_what_is_needed(version):
    with pytest.raises(SetupError, match=rf"needs Python 3.11 to 3.14, but .*old-python is 3.{version[1]}; "):
        setup_env.check_python(version, "old-python")


@pytest.mark.parametrize("module", [setup_env, setup_steps, scripts, scripts.setup])
def test_an_old_python_can_parse_the_script_that_rejects_it(module):
    source = Path(module.__file__).read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 6))
    early = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in early for alias in node.names} | {getattr(node, "module", None) for node in early}
    assert "tomllib" not in names and "__future__" not in names, "the Pythons that must parse this know neither"
    annotations = [node.annotation for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    assert not [node for node in annotations if not isinstance(node, ast.Name)], (
        "list[int] fails when Python 3.8 reads it"
    )


WANTED = Marker(ready=True, ours=True, fingerprint="now", root="here", extras=["server"])


@pytest.mark.parametrize(
    ("marker", "venv_exists", "has_python", "action"),
    [
        (None, False, False, "create"),
        (WANTED, True, True, "ready"),
        (WANTED._replace(extras=["gpu", "server"]), True, True, "ready"),
        (WANTED._replace(extras=[]), True, True, "update"),
        (WANTED._replace(fingerprint="before"), True, True, "update"),
        (WANTED._replace(ready=False), True, True, "recreate"),
        (WANTED._replace(root="there"), True, True, "recreate"),
        (WANTED, True, False, "recreate"),
        (None, True, True, "adopt"),
        (WANTED._replace(ours=False, ready=False), True, True, "adopt"),
        (WANTED._replace(ours=False, root="there"), True, True, "adopt"),
    ],
)
def test_the_plan_follows_from_the_state_of_venv(marker, venv_exists, has_python, action):
    assert make_plan(marker, WANTED, venv_exists, has_python).action == action


@pytest.mark.parametrize("marker", [None, WANTED._replace(ours=False)])
def test_a_folder_that_setup_did_not_make_is_never_deleted(marker):
    with pytest.raises(SetupError, match=r"remove \.venv and try again"):
        make_plan(marker, WANTED, venv_exists=True, has_python=False)


def test_a_marker_survives_a_round_trip(tmp_path: Path):
    path = tmp_path / ".venv" / "course-setup.json"
    assert Marker.read(path) is None
    WANTED.write(path)
    assert Marker.read(path) == WANTED
    assert [child.name for child in path.parent.iterdir()] == [path.name], "no draft may be left behind"
    path.write_text("{", encoding="utf-8")
    assert Marker.read(path) is None


def test_the_fingerprint_covers_only_what_is_installed():
    settings = setup_env.read_settings()
    before = setup_env.fingerprint(settings, "sympy==1.14.0")
    settings["tool"]["ruff"]["line-length"] = 1
    assert setup_env.fingerprint(settings, "sympy==1.14.0") == before, (
        "a linter's setting must not reinstall everything"
    )
    assert setup_env.fingerprint(settings, "sympy==1.15.0") != before, "a newly locked version must be installed"
    settings["dependency-groups"]["test"] = []
    assert setup_env.fingerprint(settings, "sympy==1.14.0") != before


def recorded_setup(monkeypatch, folder: Path, torch_index: str = "") -> dict[str, list[str]]:
    """What `setup` would run in an empty folder, by the title of each step; nothing is run."""
    steps = {}

    class Recorded:
        def __init__(self, total, log):
            pass

        def run(self, title, command):
            steps[title] = [str(part) for part in command]

    monkeypatch.setattr(setup_env, "VENV", folder / ".venv")
    monkeypatch.setattr(setup_env, "venv_python", lambda: folder / ".venv" / "python")
    monkeypatch.setattr(setup_env, "has_pip", lambda python: True)
    monkeypatch.setattr(setup_env, "Steps", Recorded)
    monkeypatch.setattr(setup_env, "check_python", lambda version: None)
    setup_env.setup(["server"], torch_index, Machine("Windows", "AMD64", False, must_not_ask))
    return steps


@pytest.mark.parametrize("torch_index", ["", "https://example.org/torch"])
def test_what_is_installed_is_what_is_locked(monkeypatch, tmp_path: Path, torch_index: str):
    steps, locked = recorded_setup(monkeypatch, tmp_path, torch_index), ["-c", str(setup_env.CONSTRAINTS)]
    assert steps["the course and its tools"][-2:] == locked, "two set-ups on two days must be the same"
    torch = steps[f"torch {setup_env.TORCH}"]
    assert torch[-2:] == (["--index-url", torch_index] if torch_index else locked), (
        "an index of torch's own may lack the locked versions of what torch needs"
    )


def test_newly_locked_versions_bring_venv_up_to_date(monkeypatch, tmp_path: Path, capsys):
    recorded_setup(monkeypatch, tmp_path)
    setup_env.venv_python().touch()
    assert recorded_setup(monkeypatch, tmp_path) == {}, "nothing has changed, so nothing is run"
    monkeypatch.setattr(setup_env, "CONSTRAINTS", tmp_path / "constraints.txt")
    setup_env.CONSTRAINTS.write_text("sympy==0.1\n", encoding="utf-8")
    assert "the course and its tools" in recorded_setup(monkeypatch, tmp_path)
    assert "updating .venv" in capsys.readouterr().err


def test_a_failing_step_shows_the_end_of_its_output(tmp_path: Path, capfd):
    steps = setup_steps.Steps(total=1, log=tmp_path / "log")
    program = "print('Progress 1 of 4'); print('no such package'); raise SystemExit(3)"
    with pytest.raises(SetupError, match=r"step 1 failed.*\n    no such package"):
        steps.run("an example", [sys.executable, "-c", program])
    assert (tmp_path / "log").read_text(encoding="utf-8") == "no such package\n"
    assert "1/1  an example" in capfd.readouterr().err


def test_the_users_pip_settings_cannot_redirect_the_installation(monkeypatch):
    monkeypatch.setenv("PIP_TARGET", "elsewhere")
    monkeypatch.setenv("PIP_USER", "1")
    env = setup_steps.pip_environment()
    assert "PIP_TARGET" not in env and env["PIP_USER"] == "0"


def test_help_is_quick_and_touches_nothing(tmp_path):
    """With -I and -S: it runs with nothing installed, from any folder."""
    command = [sys.executable, "-I", "-S", setup_env.__file__, "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8", check=True, timeout=60)
    assert "--extras" in done.stdout and "--run" in done.stdout and done.stderr == ""
