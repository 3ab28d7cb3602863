"""Course machinery. What the website's players replay: a recorder for each picture, and the files they write."""
