"""Lesson 7. OpenAI's HTTP API over the engine. Needs the extra `server`."""
