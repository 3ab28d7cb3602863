"""Course machinery. Keeps the pages in step with the source: code blocks, API page, map, the ladder's figures."""
