"""Lesson 7. The output form of an answer, from JSON schemas to the engine's grammars. Needs llguidance, and no HTTP."""
