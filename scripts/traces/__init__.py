"""Course machinery. Recorders of the website's players, one for each picture, and the files they write."""
