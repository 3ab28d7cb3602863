"""Course machinery. The pocket hybrid: a small Qwen3.5 checkpoint in this folder, trained on the pocket's text.

README.md in this folder says how it was trained and how good it is.
"""
