"""Course machinery. Finds the files in the folder that a student handed in."""

from pathlib import Path

from mini_engine.base.errors import UserError


def work_folder(path: Path) -> Path:
    """Return the folder that contains l0, l1, …: the given one, or `work` in it.

    Raises:
        UserError: it does not exist.
    """
    if not path.is_dir():
        raise UserError(
            f"{path} is not a folder; give what the student handed in: the folder work, or one that contains it"
        )
    return path / "work" if (path / "work").is_dir() else path
