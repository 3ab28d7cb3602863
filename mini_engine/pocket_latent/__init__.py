"""Course machinery. The pocket model with latents: a small DeepSeek-V3 checkpoint, trained on the pocket's text.

README.md in this folder says how well, and how it was trained.
"""

from pathlib import Path

POCKET_LATENT_DIR = Path(__file__).resolve().parent
