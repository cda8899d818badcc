"""How fast the proxy is, beside other programs doing the same work on the same machine, in the same minute.

| module        | what it does                                                                             |
|---------------|------------------------------------------------------------------------------------------|
| `run`         | the whole measurement: starts everything, interleaved rounds, medians, ratios, the table |
| `report`      | medians and ratios, as a table, as JSON, as Markdown                                     |
| `contestants` | the programs measured: none at all, nginx, mitmproxy, this proxy                         |
| `origin`      | the server behind them all; answers only to the real key, so each request proves a swap  |
| `load`        | the load generator: one closed loop per connection, clear, TLS, or TLS inside CONNECT    |

Method and results: docs/performance.md.
"""
