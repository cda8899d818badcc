"""Tests of the control plane: over real sockets, on real SQLite files, where it matters on a real PostgreSQL too.

| support      | what it gives                                                                  |
|--------------|--------------------------------------------------------------------------------|
| `serving`    | a control plane listening on loopback, in a thread or as a process             |
| `workspace`  | one tenant with its runtime, its proxy's view and a credential: what tests use |
| `postgresql` | a PostgreSQL server of our own                                                 |
"""
