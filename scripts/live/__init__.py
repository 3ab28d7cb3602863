"""Course machinery. Python for the website's pages, run by Pyodide: labs on the engine's own code, and checks of tasks.

Everything here also runs in an ordinary Python, where the tests compare the two.
"""
