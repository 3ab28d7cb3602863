"""Course machinery. Turns lessons/ into the website: Markdown extensions, vendored files, a report, a browser.

Not called `site`, because Python has a module of that name.
"""
