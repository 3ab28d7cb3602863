"""Course machinery. The environment of every process under `check`."""

import os

from lessons._course.places import CHILD, Places

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUTF8": "1",
    "PYTHONUNBUFFERED": "1",
    "KV_COURSE_QUICK": "1",  # hypothesis' tests try fewer examples than in the full suite
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the same check for every student, whatever plugins are installed
}


def python_environment(places: Places) -> dict[str, str]:
    """Return the environment for child processes: this repository first on the path, no network, one thread."""
    paths = [str(CHILD), str(places.root), os.environ.get("PYTHONPATH", "")]
    return QUIET | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",  # the models are too small to gain from a second thread
    }
