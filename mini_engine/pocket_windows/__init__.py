"""Course machinery. The pocket model with windows: a config.json for the pocket model's own weights.

Four of six layers see 23 tokens. It was not trained that way but still writes sentences; README.md says how good it is.
"""
