"""The command line and the local all-in-one stack: the only place that composes control plane, proxy and runtime.

| module        | what it is                                                                              |
|---------------|-----------------------------------------------------------------------------------------|
| `cli`         | the commands wired together, and the border at which every failure becomes one line      |
| `terminal`    | what people and scripts get to see: tables, JSON, one-line errors                        |
| `state`       | the state folder: its files, their modes, who may read them                              |
| `record`      | which process is the local stack, and whether it still is: asked before a secret is sent |
| `stack`       | `up`, `down`, `status`; finding, starting and joining the local stack                    |
| `host`        | the process behind it: control plane and proxy on one event loop                         |
| `serve`       | `serve …`: one production process, configured by `COATCHECK_*`                           |
| `client`      | the control plane's HTTP API as the commands use it                                      |
| `credential`, `grant`, `allow`, `placeholder`, `exchange`, `audit`, `explain`, `authority` | one noun each        |
| `run`         | `run -- CMD`: CMD with placeholders and a way out, and without a key                     |
| `lease`       | the placeholders of one run, renewed in place                                            |
| `relay`       | listeners opened for one run: they prove its caller to the proxy                         |
| `environment` | which variables CMD gets, and which it does not (pure)                                   |
| `trust`       | the certificates CMD trusts: system roots and our CA                                     |
| `child`       | CMD itself: signals, pseudo-terminal, exit status                                        |
| `sandbox`     | CMD inside bubblewrap; `launcher` is its first process                                   |
| `mounts`      | the other paths that lead to a folder                                                   |
| `doctor`      | every link checked, each with what to do                                                 |
| `demo`        | the whole idea shown and verified on the wire                                            |
"""
