"""Course machinery. A small LLM inference engine; each of its modules names the lesson that it belongs to."""
