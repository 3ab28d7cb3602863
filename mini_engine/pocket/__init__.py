"""Course machinery. The pocket model: a small Qwen3 checkpoint in this folder.

README.md in this folder says what the model knows and how it was trained.
"""

from pathlib import Path

POCKET_DIR = Path(__file__).resolve().parent
