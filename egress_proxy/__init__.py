"""The egress proxy: swaps each placeholder for the tenant's real key on its way upstream, and refuses the rest.

A request walks through these files in this order:

| file              | what it does                                                                             |
|-------------------|------------------------------------------------------------------------------------------|
| `server`          | listeners, worker processes, drain                                                       |
| `preamble`        | how a listener opened for one session says whose it is                                   |
| `client`          | one client connection: CONNECT, TLS, heads, keep-alive, refusals                          |
| `core/`           | pure: heads, the decision in numbered steps, substitution, scrubbing                      |
| `resolver`        | what the control plane said, cached and invalidated by its events                         |
| `exchange`        | one request and its reply, streamed both ways                                             |
| `upstream`        | addresses checked, dialled, verified, pooled                                              |
| `outlet`          | what a turn of the loop writes, sent at its end                                           |
| `audit`           | one event for each decision, spooled and delivered                                        |

Beside them: `tls` and `client_hello` (TLS over a transport that is already read from), `ca` (the interception CA),
`addresses` (names into addresses that may be dialled), `cache` (how long an answer is believed), `refusals` (how a "no"
looks), `services` (what all connections share), `admin`, `metrics` and `probe` (health that swaps), `logs`,
`hardening`, `config`, `bootstrap` (the wiring, by hand) and `workers` (several processes).
"""
