"""Course machinery. A small LLM inference engine; each of its modules names the lesson that it belongs to."""

__version__ = "0.1.0"
