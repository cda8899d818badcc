"""How fast the proxy is, beside other programs doing the same work on the same machine, in the same minute.

| module          | what it does                                                                               |
|-----------------|--------------------------------------------------------------------------------------------|
| `run`           | the whole measurement: starts everything, interleaved rounds, medians, ratios, the tables  |
| `parts`         | the parts beside the table of requests: streams, downloads, memory, workers, growth        |
| `measures`      | one figure, and what it should be                                                          |
| `report`        | medians and ratios, as tables, as JSON, as Markdown                                        |
| `contestants`   | what is measured: no proxy at all, and this proxy                                          |
| `peers`         | nginx, haproxy, Envoy, mitmproxy                                                           |
| `origin`        | the server behind them all; answers only to the real key, so each request proves a swap    |
| `load`          | the load generator: one closed loop per connection, clear, TLS, or TLS inside CONNECT      |
| `driver`        | runs `load`, `stream` and wrk as processes of their own, on the load's core                |
| `stream`        | server-sent events at an even pace, and how late each one comes                            |
| `download`      | a gigabyte, and the processor time it takes                                                |
| `idle`          | connections that say nothing: their memory, and which worker has them                      |
| `placeholders`  | a decision, as the cache fills up                                                          |
| `control_plane` | exchanges and resolves                                                                     |
| `rotation`      | how long an old key is used after a rotation                                               |

Method and results: docs/performance.md.
"""
