"""Course machinery. The checkpoints that come with the package, by their short names.

Most have their own folders. pocket-windows is a config.json for the pocket model's weights: a directory with both is
assembled once, in the user's cache, so that everything that reads checkpoints can read it.
"""

import hashlib
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SHIPPED = ("pocket", "pocket-hybrid", "pocket-windows", "pocket-latent")
FILES = (".json", ".safetensors", ".jinja")


def shipped_checkpoint(name: str) -> Path:
    """Return the directory of a shipped checkpoint; `name` is one of SHIPPED."""
    folder = PACKAGE / name.replace("-", "_")
    return combined(name, folder / "config.json", PACKAGE / "pocket") if name == "pocket-windows" else folder


@cache
def combined(name: str, config: Path, weights: Path) -> Path:
    """Return a directory with this config.json and the other files of the checkpoint `weights`."""
    from mini_engine.base.native_build import cache_dir  # lesson 3's

    files = [path for path in sorted(weights.iterdir()) if path.suffix in FILES and path.name != config.name] + [config]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    target = cache_dir() / f"{name}-{digest.hexdigest()[:16]}"
    if (target / config.name).exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="building-", dir=target.parent))
    except OSError:  # the cache cannot be written: for this process only
        return _fill(Path(tempfile.mkdtemp(prefix=f"{name}-")), files)
    _fill(made, files)
    with suppress(OSError):  # another process has created it
        made.rename(target)
    shutil.rmtree(made, ignore_errors=True)
    return target


def _fill(directory: Path, files: list[Path]) -> Path:
    """Copy files into a directory in order, config.json last: a directory that has one is complete."""
    for path in files:
        shutil.copyfile(path, directory / path.name)
    return directory
