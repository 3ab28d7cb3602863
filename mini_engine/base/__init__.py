"""Course machinery. Definitions that every other room may use: errors, values in messages, signals, building C++."""
