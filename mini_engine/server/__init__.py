"""Lesson 7. The HTTP face of the engine, as OpenAI's clients expect it. Needs the extra `server`."""
