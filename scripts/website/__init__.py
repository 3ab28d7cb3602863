"""Course machinery. How lessons/ becomes the website: Markdown extensions, vendored files, a report, a browser.

Not called `site`: Python has a module of that name.
"""
