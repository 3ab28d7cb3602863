"""Lesson 7. Defence of the HTTP server: much of it is what a reverse proxy in front would do.

`wrapping.harden` goes around the app, `connections.HardenedServer` around uvicorn, `ending.end_in_time` around the
process. No other module of the server imports anything from here.
"""
