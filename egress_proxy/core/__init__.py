"""The egress proxy's decisions, pure and synchronous: no I/O, no clock, no entropy.

Read in this order, which is the order of a request:

| module         | what it answers                                                                   |
|----------------|-----------------------------------------------------------------------------------|
| `fields`       | what is in this field line? (names, markers in any encoding)                       |
| `http1`        | is this head one that every reader would read alike? (framing, limits, chunks)     |
| `view`         | what the cache knows: callers, policies, placeholders                              |
| `decision`     | may this request go, where, and with which secrets? `Forward`, `Resolve`, `Refuse`  |
| `plan`         | the same request again: is it decided already?                                     |
| `substitution` | where placeholders stand in a head, and the head that goes upstream                |
| `scrub`        | the way back: no secret in a reply, however it is cut                              |
"""
