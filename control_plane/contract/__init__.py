"""What the control plane, the egress proxy and the runtime agree on. No I/O, no clock, no entropy.

| module        | what it fixes                                                                  |
|---------------|--------------------------------------------------------------------------------|
| `caller`      | ids, and the attested caller tuple (client, tenant, subject, session)          |
| `address`     | which addresses are on the public internet                                     |
| `destination` | where a credential may go: canonical hosts, ports, path prefixes, methods      |
| `placement`   | where a secret stands in a request: header, Basic, query                       |
| `kinds`       | kinds of credential, and whose secret is a text that can be placed             |
| `secret`      | a value that does not show itself                                              |
| `placeholder` | shape, marker, keyed tag; mint, parse, find                                    |
| `credential`  | the tagged union `{"mode": "placeholder" or "direct", "value": …}`             |
| `grant`       | how a grant narrows what a credential may do                                   |
| `refusal`     | the one closed list of expected "no", and its status at every edge             |
| `headers`     | header names, token types and media types on the wire                          |
| `wire`        | requests and answers of `/internal`                                            |

This package is the only part of the control plane that the others may import (import-linter holds that).
"""
