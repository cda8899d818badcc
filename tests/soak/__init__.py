"""The soak: real processes under mixed load and faults, for as long as it is given (`make soak`).

- `place`: the processes, on PostgreSQL and Valkey, or on SQLite alone
- `origin`: the upstream, with every fault that one may have
- `load`: the clients, good ones and bad ones
- `faults`: what operators and machines do meanwhile
- `samples`: descriptors, tasks and memory of every process over time, and whether they grow
- `run`: all of it, a table at its end, and a verdict
"""
