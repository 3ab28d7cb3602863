"""Lesson 7. Defence of the HTTP server: much of it is what a reverse proxy in front would do.

`wrapping.harden` goes around the app, whose routes call `bodies.read_body`; `connections.HardenedServer` goes around
uvicorn, `ending.end_in_time` around the process. The server imports nothing else from here.
"""
