"""Course machinery. The pocket model with latents: a small DeepSeek-V3 checkpoint, trained on the pocket's text.

README.md in this folder says how it was trained and how good it is.
"""
